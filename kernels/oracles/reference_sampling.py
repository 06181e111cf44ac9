"""What the kernels of sampling must compute, in plain torch: the oracles of tests, with the launchers' own signatures.

R rows of logits f32[R, vocab], of which N >= R samples may be drawn: sample n from row `rows[n]`. Most rows need only a
few of their logits, so the first pass over them leaves the largest of every chunk of CHUNK_SIZE tokens behind, and
whoever comes later skips the chunks that hold nothing for it. Results of a row depend on that row alone.
"""

from __future__ import annotations

import torch

CHUNK_SIZE = 64

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, added to the key each round


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Makes tokens that were there before less likely, in place, in P rows of `logits`.

        x <- (x / repetition where x > 0, else x * repetition) where the token was generated or stands in the prompt
        x <- x - frequency * times generated - presence * (1 where it was generated)

    Repetition as Keskar et al. 2019, arXiv:1909.05858. rows i64[P], different ones; counts i32[C, vocab]: twice how
    often a token was generated, and 1 more where it stands in the prompt; count_rows i64[P]; the penalties f32[P].
    """
    seen = counts[count_rows]
    generated = seen >> 1
    x = logits[rows]
    repeated = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = torch.where(seen > 0, repeated, x)
    x = x - frequency[:, None] * generated
    logits[rows] = x - presence[:, None] * (generated > 0)


def chunk_maxima(out: torch.Tensor, logits: torch.Tensor) -> None:
    """The largest logit of each chunk of CHUNK_SIZE tokens, the last of which may be shorter; NaN where one is NaN.

    out f32[R, ceil(vocab / CHUNK_SIZE)].
    """
    vocab_size = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % CHUNK_SIZE), value=-torch.inf)
    out.copy_(padded.unflatten(1, (-1, CHUNK_SIZE)).amax(dim=-1))


def most_likely(token_ids: torch.Tensor, largest: torch.Tensor, logits: torch.Tensor) -> None:
    """The largest logit of each row, f32[R], NaN where one is NaN; and the first token that has it, i64[R].

    Token 0 where the largest is not finite: nothing can be drawn there. What `draw_tokens` says at temperature 0.
    """
    torch.max(logits, dim=-1, out=(largest, token_ids))  # of equal ones the first
    token_ids.masked_fill_(~torch.isfinite(largest), 0)


def kept_range(
    smallest: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """The smallest logit of each row that its filters keep, f32[R]; -inf without filters, at temperature 0, and where
    the largest logit is not finite.

    In the order min-p, top-k, top-p: each comes down to a smallest logit, so tokens that tie with the last one kept are
    kept as well. `maxima` are the row's `chunk_maxima`, `largest` f32[R] the largest of them. temperature, min_p (0:
    off), top_p (1: off) f32[R]; top_k i64[R] (0, or no less than the vocabulary: off).

        min-p: logit >= largest + temperature * log(min_p)
        top-k: logit >= the top_k-th largest, equal ones counted
        top-p: the tokens before it, in falling order, hold less than top_p of the weight exp(logit / temperature)
               of those that are left
    """
    smallest.fill_(-torch.inf)
    for row in range(logits.shape[0]):
        if not torch.isfinite(largest[row]) or temperature[row] == 0:
            continue
        temperature64 = temperature[row].double()
        bound = (largest[row].double() + temperature64 * min_p[row].double().log()).float()
        ordered = logits[row].sort(descending=True).values
        if 0 < top_k[row] < ordered.numel():
            bound = bound.maximum(ordered[int(top_k[row]) - 1])
        if top_p[row] < 1:
            left = ordered[ordered >= bound]
            sums = ((left.double() - largest[row]) / temperature64).exp().cumsum(0)
            num_kept = 1 + int((sums[:-1] < top_p[row].double() * sums[-1]).sum())
            bound = bound.maximum(left[num_kept - 1])
        smallest[row] = bound


def draw_tokens(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor,
    largest: torch.Tensor,
    smallest: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor,
    seeds: torch.Tensor,
    sequence_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Draws token_ids i64[N], each an exact function of its row of logits, its parameters and its counter.

    The first token, in the order of ids, up to which the weights exp((logit - largest) / temperature) of logits >=
    `smallest` sum to more than `uniforms` of all of them. At temperature 0 the largest, ties to the lowest id; 0 where
    the largest logit is not finite. maxima, largest, smallest, temperature: as of `kept_range`, one entry a row; rows
    i64[N], which do not fall; seeds i64[N], the bits of 64-bit numbers; sequence_indices, positions i64[N].
    """
    numbers = uniforms(seeds, sequence_indices, positions)
    for sample, row in enumerate(rows.tolist()):
        x = logits[row]
        if not torch.isfinite(largest[row]):
            token_ids[sample] = 0
        elif temperature[row] == 0:
            token_ids[sample] = (x == largest[row]).int().argmax()
        else:
            weights = ((x.double() - largest[row]) / temperature[row].double()).exp().masked_fill(x < smallest[row], 0)
            sums = weights.cumsum(0)
            token_ids[sample] = torch.searchsorted(sums, numbers[sample] * sums[-1], right=True)


def uniforms(seeds: torch.Tensor, sequence_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number f64[N] in [0, 1) with 53 random bits for each (seed, index in the group, token position) i64[N].

    Philox4x32-10, a pure function of (key, counter): J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011. The key is the seed, the counter position and then index, low words
    first; of the four words that come out the first gives the upper 27 bits and the second the lower 26.
    """
    numbers = []
    for seed, index, position in zip(seeds.tolist(), sequence_indices.tolist(), positions.tolist(), strict=True):
        high, low, _, _ = philox4x32((*_words(position), *_words(index)), _words(seed))
        numbers.append(((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53)
    return torch.tensor(numbers, dtype=torch.float64, device=seeds.device)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = (
            divmod(factor * word, 2**32) for factor, word in zip(_PHILOX_MULTIPLIERS, (c0, c2), strict=True)
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _PHILOX_WEYL[0]) % 2**32, (k1 + _PHILOX_WEYL[1]) % 2**32
    return c0, c1, c2, c3


def _words(number: int) -> tuple[int, int]:
    """The low and the high half of a 64-bit number."""
    high, low = divmod(number % 2**64, 2**32)
    return low, high


def token_logprobs(
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    log_sums: torch.Tensor,
    logits: torch.Tensor,
    largest: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Log-softmax of one token a sample, f32[N], and its rank i64[N] among its row's logits: 1 is the most likely.

        log_sum = log(sum exp(logit - largest)),  logprob = (logit - largest) - log_sum, rounded twice

    `largest` f32[R] of each row; where it is not finite: NaN, rank 1. token_ids i64[N]; log_sums f32[N].
    """
    for sample, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
        x, is_good = logits[row], torch.isfinite(largest[row])
        log_sums[sample] = (x.double() - largest[row]).exp().sum().log() if is_good else torch.nan
        logprobs[sample] = (x[token_id] - largest[row]) - log_sums[sample] if is_good else torch.nan
        ranks[sample] = 1 + (x > x[token_id]).sum() if is_good else 1


def top_logits(
    token_ids: torch.Tensor, values: torch.Tensor, logits: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor
) -> None:
    """The K largest logits of each sample's row, f32[N, K], and whose they are, i64[N, K]: ties by token id.

    K at most the vocabulary; `maxima` are the `chunk_maxima`. Token 0 and NaN throughout for a row that has a NaN.
    """
    found = logits[rows].sort(dim=-1, descending=True, stable=True)
    is_bad = maxima[rows].isnan().any(dim=-1, keepdim=True)
    token_ids.copy_(found.indices[:, : token_ids.shape[1]].masked_fill(is_bad, 0))
    values.copy_(found.values[:, : values.shape[1]].masked_fill(is_bad, torch.nan))
