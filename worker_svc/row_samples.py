"""The samples of all rows of a step, in the order of the rows: draws from most, candidates of those in a beam search.

Candidates are the most likely tokens by the raw log-softmax in float32, whatever temperature and filters say: which of
them a beam goes on with is decided elsewhere, by sums of these numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.errors import ProtocolError
from worker_svc.sampled import Logprobs, Sampled
from worker_svc.sampler import Draws, sample
from worker_svc.sampling_columns import SamplingColumns
from worker_svc.sequence_states import AppliedRows
from worker_svc.step_columns import Ints, ragged_offsets
from worker_svc.top_tokens import top_tokens


def sample_rows(
    logits: torch.Tensor, sampling: SamplingColumns, rows: AppliedRows, raw_logits: torch.Tensor | None = None
) -> Sampled:
    """Samples from `logits` f32[L, vocab], one row for each of `rows` that samples; `bad_rows` are among these L.

    `raw_logits` are those before adjustments, of which logprobs are taken; None: the same. Raises ProtocolError for
    more candidates than there are tokens.
    """
    sampling_rows = np.flatnonzero(rows.num_samples)
    logits_rows = np.searchsorted(sampling_rows, rows.sample_rows)  # [N], the row of logits of each sample
    draws = Draws(logits_rows, rows.sample_indices, rows.sample_positions)
    if not rows.is_candidate.any():
        return sample(logits, sampling.take(rows.slots[sampling_rows]), draws, raw_logits)

    ranks = sampling.use_beam_search[rows.slots[sampling_rows]]  # [L], rather than draws
    ranked = candidates(logits[torch.from_numpy(ranks)], rows.num_samples[sampling_rows[ranks]])
    if ranks.all():
        return ranked
    is_draw = ~rows.is_candidate
    row_of_draws = np.cumsum(~ranks) - 1  # [L], among the rows that draw
    drawn = sample(
        logits[torch.from_numpy(~ranks)],
        sampling.take(rows.slots[sampling_rows[~ranks]]),
        Draws(row_of_draws[logits_rows[is_draw]], rows.sample_indices[is_draw], rows.sample_positions[is_draw]),
        None if raw_logits is None else raw_logits[torch.from_numpy(~ranks)],
    )
    return _merged(drawn, ranked, ranks, rows)


def candidates(logits: torch.Tensor, counts: Ints) -> Sampled:
    """The counts[r] most likely tokens of every row of `logits` f32[R, vocab], best first, ties by token id."""
    if int(counts.max()) > logits.shape[-1]:
        raise ProtocolError(f"{counts.max()} candidates asked for, of a vocabulary of {logits.shape[-1]}")
    is_bad = ~torch.isfinite(logits.max(dim=-1).values)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    logprobs[is_bad] = 0.0  # no token is better than another; nobody reads them
    token_ids, values = top_tokens(logprobs, counts)
    nothing = np.zeros(token_ids.size, np.int64)
    found = Logprobs(values, ragged_offsets(counts) + 1, nothing, np.zeros(0, np.int64), np.zeros(0, np.float32))
    return Sampled(token_ids, np.flatnonzero(is_bad.numpy()), found)


def _merged(drawn: Sampled, ranked: Sampled, ranks: np.ndarray, rows: AppliedRows) -> Sampled:
    """Both in the order of the step's rows. `ranks` [L] says which rows of logits candidates came from."""
    size = rows.is_candidate.size
    token_ids, logprobs = np.zeros(size, np.int64), np.zeros(size, np.float32)
    token_ranks, top_counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    top_token_ids, top_logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    for part, where in ((drawn, ~rows.is_candidate), (ranked, rows.is_candidate)):
        token_ids[where] = part.token_ids
        if part.logprobs is not None:
            logprobs[where], token_ranks[where] = part.logprobs.drawn, part.logprobs.ranks
    if drawn.logprobs is not None:  # candidates name no others
        top_counts[~rows.is_candidate] = drawn.logprobs.top_counts
        top_token_ids, top_logprobs = drawn.logprobs.top_token_ids, drawn.logprobs.top_logprobs
    bad_rows = np.concatenate([np.flatnonzero(~ranks)[drawn.bad_rows], np.flatnonzero(ranks)[ranked.bad_rows]])
    return Sampled(
        token_ids, np.sort(bad_rows), Logprobs(logprobs, token_ranks, top_counts, top_token_ids, top_logprobs)
    )
