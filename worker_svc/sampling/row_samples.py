"""The samples of all rows of a step, in the order of the rows: draws from most, candidates of those in a beam search.

Candidates are the most likely tokens by the raw log-softmax in float32, whatever temperature and filters say: which of
them a beam goes on with is decided elsewhere, by sums of these numbers. Nothing waits for the device before `on_host`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import ProtocolError
from worker_svc.host.uploads import upload
from worker_svc.mirror.sampling_columns import SamplingColumns
from worker_svc.mirror.sequence_states import AppliedRows
from worker_svc.mirror.step_columns import Ints, ragged_offsets
from worker_svc.sampling.row_maxima import RowMaxima
from worker_svc.sampling.sampled import Logprobs, Sampled
from worker_svc.sampling.sampler import Drawn, Draws, draw, take_largest
from worker_svc.sampling.token_logprobs import FoundLogprobs, find_logprobs


@dataclass(frozen=True, slots=True)
class Ranked:
    """The most likely tokens of some rows, on the device of the logits."""

    found: FoundLogprobs
    largest: torch.Tensor  # f32[R], logits

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is to be copied to the host."""
        return self.largest, *self.found.tops

    def on_host(self, arrays: tuple[npt.NDArray[Any], ...]) -> Sampled:
        """From copies of `tensors`. Rows that are not finite have as many candidates as others, which mean nothing."""
        largest, *tops = arrays
        token_ids, logprobs = self.found.wanted_of(tops, self.found.counts)
        ranks, nothing = ragged_offsets(self.found.counts) + 1, np.zeros(token_ids.size, np.int64)
        found = Logprobs(logprobs, ranks, nothing, np.zeros(0, np.int64), np.zeros(0, np.float32))
        return Sampled(token_ids, np.flatnonzero(~np.isfinite(largest)), found)


@dataclass(frozen=True, slots=True)
class RowSamples:
    """What was sampled of a step, on the device of the logits."""

    drawn: Drawn | None  # None: nothing was drawn
    ranked: Ranked | None  # None: there is no beam search
    ranks: npt.NDArray[np.bool_]  # [L], rows of logits that are ranked
    is_adjusted: npt.NDArray[np.bool_]  # [L], rows whose parameters change logits before they are drawn from
    is_candidate: npt.NDArray[np.bool_]  # [N], samples
    device: torch.device

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids of all N samples, i64[N], on the device; those of candidates are meaningless."""
        if self.ranked is None and self.drawn is not None:
            return self.drawn.token_ids
        (draws,) = upload(self.device, np.flatnonzero(~self.is_candidate))
        token_ids = draws.new_zeros(self.is_candidate.size)
        if self.drawn is not None:
            token_ids[draws] = self.drawn.token_ids
        return token_ids

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is to be copied to the host."""
        drawn = () if self.drawn is None else self.drawn.tensors
        return drawn if self.ranked is None else (*drawn, *self.ranked.tensors)

    def on_host(self, arrays: tuple[npt.NDArray[Any], ...]) -> Sampled:
        """From copies of `tensors`; `bad_rows` are among the L rows of logits.

        Of logits that are all -inf the row's parameters are the cause, where they change logits. They cannot make a
        number that is not one, nor infinity, of a finite logit: penalties and biases are bounded.
        """
        num_drawn = 0 if self.drawn is None else len(self.drawn.tensors)
        drawn = None if self.drawn is None else self.drawn.on_host(arrays[:num_drawn])
        ranked = None if self.ranked is None else self.ranked.on_host(arrays[num_drawn:])
        if drawn is None or ranked is None:
            one = drawn or ranked
            assert one is not None, "rows that sample nothing"
        else:
            one = _merged(drawn, ranked, self.ranks, self.is_candidate)
        if not one.emptied_rows.size:
            return one
        return replace(one, emptied_rows=one.emptied_rows[self.is_adjusted[one.emptied_rows]])


def sample_rows(
    logits: torch.Tensor, sampling: SamplingColumns, rows: AppliedRows, raw_logits: torch.Tensor | None = None
) -> Sampled:
    """`draw_rows`, and its result on the host."""
    samples = draw_rows(logits, sampling, rows, raw_logits)
    return samples.on_host(tuple(tensor.cpu().numpy() for tensor in samples.tensors))


def draw_rows(
    logits: torch.Tensor, sampling: SamplingColumns, rows: AppliedRows, raw_logits: torch.Tensor | None = None
) -> RowSamples:
    """Samples from `logits` f32[L, vocab], one row for each of `rows` that samples.

    `raw_logits` are those before adjustments, of which logprobs are taken; None: the same. `check_candidates` has found
    the rows good.
    """
    sampling_rows = np.flatnonzero(rows.num_samples)
    logits_rows = np.searchsorted(sampling_rows, rows.sample_rows)  # [N], the row of logits of each sample
    ranks = sampling.use_beam_search[rows.slots[sampling_rows]]  # [L], rather than draws
    is_draw = ~rows.is_candidate
    drawn, ranked = None, None
    if ranks.any():
        ranked = candidates(_rows_of(logits, ranks), rows.num_samples[sampling_rows[ranks]])
    if is_draw.any():
        row_of_draws = np.cumsum(~ranks) - 1  # [L], among the rows that draw
        draws = Draws(row_of_draws[logits_rows[is_draw]], rows.sample_indices[is_draw], rows.sample_positions[is_draw])
        raw = None if raw_logits is None or raw_logits is logits else _rows_of(raw_logits, ~ranks)
        drawn = draw(_rows_of(logits, ~ranks), sampling.take(rows.slots[sampling_rows[~ranks]]), draws, raw)
    is_adjusted = sampling.adjusts_logits[rows.slots[sampling_rows]]
    return RowSamples(drawn, ranked, ranks, is_adjusted, rows.is_candidate, logits.device)


def largest_of_rows(logits: torch.Tensor, rows: AppliedRows) -> RowSamples:
    """What `draw_rows` gives where each of `rows` that samples takes the largest of its `logits` f32[L, vocab]."""
    num_rows = logits.shape[0]
    logits_rows = np.arange(num_rows)
    if rows.sample_rows.size != num_rows:
        logits_rows = np.searchsorted(np.flatnonzero(rows.num_samples), rows.sample_rows)
    nobody = np.zeros(num_rows, np.bool_)
    return RowSamples(take_largest(logits, logits_rows), None, nobody, nobody, rows.is_candidate, logits.device)


def check_candidates(rows: AppliedRows, vocab_size: int) -> None:
    """Raises ProtocolError for more candidates than there are tokens."""
    if rows.is_candidate.any():
        most = int(rows.num_samples[rows.sample_rows[rows.is_candidate]].max())
        if most > vocab_size:
            raise ProtocolError(f"{most} candidates asked for, of a vocabulary of {vocab_size}")


def candidates(logits: torch.Tensor, counts: Ints) -> Ranked:
    """The counts[r] most likely tokens of every row of `logits` f32[R, vocab], best first, ties by token id."""
    maxima = RowMaxima.of(logits)
    rows, any_token_ids = upload(logits.device, np.arange(len(counts)), np.zeros(len(counts), np.int64))
    return Ranked(find_logprobs(logits, maxima, rows, any_token_ids, counts), maxima.largest)


def _rows_of(logits: torch.Tensor, is_wanted: npt.NDArray[np.bool_]) -> torch.Tensor:
    if is_wanted.all():
        return logits
    (rows,) = upload(logits.device, np.flatnonzero(is_wanted))
    return logits[rows]


def _merged(
    drawn: Sampled, ranked: Sampled, ranks: npt.NDArray[np.bool_], is_candidate: npt.NDArray[np.bool_]
) -> Sampled:
    """Both in the order of the step's rows. `ranks` [L] says which rows of logits candidates came from."""
    size = is_candidate.size
    token_ids, logprobs = np.zeros(size, np.int64), np.zeros(size, np.float32)
    token_ranks, top_counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    top_token_ids, top_logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    for part, where in ((drawn, ~is_candidate), (ranked, is_candidate)):
        token_ids[where] = part.token_ids
        if part.logprobs is not None:
            logprobs[where], token_ranks[where] = part.logprobs.drawn, part.logprobs.ranks
    if drawn.logprobs is not None:  # candidates name no others
        top_counts[~is_candidate] = drawn.logprobs.top_counts
        top_token_ids, top_logprobs = drawn.logprobs.top_token_ids, drawn.logprobs.top_logprobs
    bad_rows = np.concatenate([np.flatnonzero(~ranks)[drawn.bad_rows], np.flatnonzero(ranks)[ranked.bad_rows]])
    return Sampled(
        token_ids,
        np.sort(bad_rows),
        Logprobs(logprobs, token_ranks, top_counts, top_token_ids, top_logprobs),
        np.flatnonzero(~ranks)[drawn.emptied_rows],  # nothing adjusts logits whose best are candidates
    )
