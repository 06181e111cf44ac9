"""Draws tokens from logits, each an exact function of (logits, parameters, seed, sequence index, position).

One uniform number a draw (`random_bits.uniforms`) inverts the cumulative distribution of the kept tokens, in the order
of their ids, in float64. Why not a Gumbel maximum, which needs a random number for every token of the vocabulary: for
32 rows of 49,152 on one core that took 28 ms, of which hashing 19 ms; all of `sample` takes 5 to 8 ms without filters.
All reductions over the vocabulary that a draw depends on are maxima or running sums, which are computed row by row, so
that a row's result does not depend on the batch it is in (`torch.sum` of a single row may be split between threads, of
several rows not).

Filters come in the order temperature, min-p, top-k, top-p. Each means what the processor of that name in `transformers`
does, and each comes down to a smallest logit that is kept: tokens that tie with the last one kept are kept as well.

Knows nothing of slots or steps: R rows of logits, N >= R samples in the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.random_bits import uniforms
from worker_svc.sampled import Logprobs, Sampled
from worker_svc.sampling_columns import SamplingRows
from worker_svc.token_logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw: sample n comes from row `rows[n]` of the logits."""

    rows: npt.NDArray[np.int64]  # [N], does not fall
    sequence_index: npt.NDArray[np.int64]  # [N]
    position: npt.NDArray[np.int64]  # [N], absolute, of the token to be drawn


def sample(logits: torch.Tensor, params: SamplingRows, draws: Draws, raw_logits: torch.Tensor | None = None) -> Sampled:
    """Draws N tokens from `logits` f32[R, vocab]; `params` has one entry a row. `logits` is left as it is.

    Logprobs are those of `raw_logits`, the model's own; None: `logits` are.
    """
    maxima, best = logits.max(dim=-1)  # ties: the lowest id; any NaN in a row makes its maximum NaN
    is_bad = ~torch.isfinite(maxima).numpy()
    token_ids = best.numpy()[draws.rows]
    is_random = (params.temperature > 0) & ~is_bad
    if is_random.any():
        token_ids = _draw(logits, maxima, params, draws, is_random, token_ids)
    token_ids = np.where(is_bad[draws.rows], 0, token_ids)
    wants_logprobs = (params.wants_logprobs & ~is_bad)[draws.rows]
    raw_logits = logits if raw_logits is None else raw_logits
    logprobs = _logprobs(raw_logits, params, draws, token_ids, wants_logprobs) if params.wants_logprobs.any() else None
    return Sampled(token_ids, np.flatnonzero(is_bad), logprobs)


# ---- Drawing ------------------------------------------------------------------------------------------------------


def _draw(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    params: SamplingRows,
    draws: Draws,
    is_random: npt.NDArray[np.bool_],
    token_ids: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """`token_ids` with those of the rows in `is_random` replaced by draws."""
    rows = np.flatnonzero(is_random)
    if not is_random.all():
        logits, maxima = logits[torch.from_numpy(rows)], maxima[torch.from_numpy(rows)]
    cumulative = kept_weights(logits, maxima, params.take(rows)).cumsum_(dim=-1)

    samples = np.flatnonzero(is_random[draws.rows])
    where = np.searchsorted(rows, draws.rows[samples])  # row of `cumulative` of each sample
    numbers = uniforms(params.seed[draws.rows[samples]], draws.sequence_index[samples], draws.position[samples])
    # Several samples of a row stand next to each other in one row of `targets`; the rest of it is padding.
    first = np.searchsorted(where, where)
    column = np.arange(samples.size) - first
    targets = torch.zeros(len(rows), int(column.max()) + 1, dtype=torch.float64)
    targets[where, column] = torch.from_numpy(numbers) * cumulative[where, -1]
    # The first token whose cumulative weight exceeds the target. It has a weight of its own, and there is one, because
    # a number below 1 times the total is below the total in float64 as well.
    drawn = torch.searchsorted(cumulative, targets, right=True)
    token_ids = token_ids.copy()
    token_ids[samples] = drawn[where, column].numpy()
    return token_ids


def kept_weights(logits: torch.Tensor, maxima: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """Probabilities after temperature and filters, but for a factor, f64[R, vocab]: the most likely token has 1.

    Each filter gives the smallest logit that is kept.
    """
    temperature = torch.from_numpy(params.temperature.astype(np.float64))
    smallest = (maxima + temperature * torch.from_numpy(params.min_p.astype(np.float64)).log()).float()
    sorts = np.flatnonzero((params.top_k > 0) | (params.top_p < 1))
    if sorts.size:
        rows = torch.from_numpy(sorts)
        ordered = _sorted(logits[rows])
        top_k = np.where(params.top_k[sorts] > 0, np.minimum(params.top_k[sorts], logits.shape[-1]), logits.shape[-1])
        of_top_k = ordered.gather(1, torch.from_numpy(logits.shape[-1] - top_k)[:, None])[:, 0]
        smallest[rows] = smallest[rows].maximum(of_top_k)
        of_top_p = _top_p(ordered, smallest[rows], temperature[rows], torch.from_numpy(params.top_p[sorts]).double())
        smallest[rows] = smallest[rows].maximum(of_top_p)
    weights = _weights(logits, maxima, temperature)
    if bool((smallest > -torch.inf).any()):
        weights.masked_fill_(logits < smallest[:, None], 0.0)
    return weights


def _weights(logits: torch.Tensor, maxima: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    weights = logits.to(torch.float64)
    weights -= maxima[:, None]
    weights /= temperature[:, None]
    return weights.exp_()


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    """Ascending in each row. numpy sorts 32 x 49,152 float32 in 3 ms, torch on the CPU in 93 ms."""
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1))


def _top_p(
    ordered: torch.Tensor, smallest: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The smallest logit that is kept, f32[R]: a token is kept while those before it hold less than `top_p`.

    `ordered` f32[R, vocab] rises in each row; logits below `smallest` are cut already.
    """
    most_kept = int((ordered >= smallest[:, None]).sum(dim=-1).max())
    best_first = ordered[:, -most_kept:].flip(-1)
    weights = _weights(best_first, best_first[:, 0], temperature)
    weights.masked_fill_(best_first < smallest[:, None], 0.0)
    sums = weights.cumsum_(dim=-1)
    last_kept = (sums[:, :-1] < top_p[:, None] * sums[:, -1:]).sum(dim=-1)
    return best_first.gather(1, last_kept[:, None])[:, 0]


# ---- Logprobs -----------------------------------------------------------------------------------------------------


def _logprobs(
    logits: torch.Tensor,
    params: SamplingRows,
    draws: Draws,
    token_ids: npt.NDArray[np.int64],
    wants: npt.NDArray[np.bool_],
) -> Logprobs:
    samples = np.flatnonzero(wants)
    drawn = np.zeros(len(token_ids), np.float32)
    ranks, top_counts = np.zeros(len(token_ids), np.int64), np.zeros(len(token_ids), np.int64)
    rows = draws.rows[samples]
    found = token_logprobs(logits[torch.from_numpy(rows)], token_ids[samples], params.num_logprobs[rows])
    drawn[samples], ranks[samples], top_counts[samples] = found.drawn, found.ranks, found.top_counts
    return Logprobs(drawn, ranks, top_counts, found.top_token_ids, found.top_logprobs)
