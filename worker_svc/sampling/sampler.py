"""Draws tokens from logits, each an exact function of (logits, parameters, seed, sequence index, position).

One uniform number a draw inverts the cumulative distribution of the kept tokens, in the order of their ids. Why not a
Gumbel maximum, which needs a random number for every token of the vocabulary: for 32 rows of 49,152 on one core that
took 28 ms, of which hashing 19 ms; all of `sample` took 5 to 8 ms without filters.

What is computed is said in `oracles.reference_sampling`, with the order of the filters; this file gives the kernels
their columns and nothing else. Everything stays where the logits are until `Drawn.on_host`: on a GPU nothing here waits
for the device. Knows nothing of slots or steps: R rows of logits, N >= R samples in the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.select import kernels_for
from worker_svc.host.uploads import upload
from worker_svc.mirror.sampling_columns import SamplingRows
from worker_svc.sampling.row_maxima import RowMaxima
from worker_svc.sampling.sampled import Logprobs, Sampled
from worker_svc.sampling.token_logprobs import FoundLogprobs, find_logprobs

NO_SAMPLES = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw: sample n comes from row `rows[n]` of the logits."""

    rows: npt.NDArray[np.int64]  # [N], does not fall
    sequence_index: npt.NDArray[np.int64]  # [N]
    position: npt.NDArray[np.int64]  # [N], absolute, of the token to be drawn


@dataclass(frozen=True, slots=True)
class Drawn:
    """What has been drawn, on the device of the logits."""

    token_ids: torch.Tensor  # i64[N]; 0 where the row is bad
    largest: torch.Tensor  # f32[R], logits; not finite where nothing can be drawn
    rows: npt.NDArray[np.int64]  # [N]
    logprobs: FoundLogprobs | None  # of `with_logprobs`
    with_logprobs: npt.NDArray[np.intp]  # [M], samples

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is to be copied to the host."""
        return self.token_ids, self.largest, *(() if self.logprobs is None else self.logprobs.tensors)

    def on_host(self, arrays: tuple[npt.NDArray[Any], ...]) -> Sampled:
        """From copies of `tensors`."""
        token_ids, largest, *of_logprobs = arrays
        is_bad = ~np.isfinite(largest)
        logprobs = None
        if self.logprobs is not None:
            rows = self.rows[self.with_logprobs]
            is_bad[rows[np.isnan(of_logprobs[0])]] = True  # the model's own logits were not finite where none is drawn
            found = self.logprobs.on_host(tuple(of_logprobs), is_bad[rows])
            logprobs = _spread(found, self.with_logprobs, len(token_ids))
        return Sampled(token_ids, is_bad.nonzero()[0], logprobs, np.isneginf(largest).nonzero()[0])


def sample(logits: torch.Tensor, params: SamplingRows, draws: Draws, raw_logits: torch.Tensor | None = None) -> Sampled:
    """`draw`, and its result on the host."""
    drawn = draw(logits, params, draws, raw_logits)
    return drawn.on_host(tuple(tensor.cpu().numpy() for tensor in drawn.tensors))


def take_largest(logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> Drawn:
    """What `draw` gives at temperature 0, without logprobs, for N samples from `rows` [N] of `logits` f32[R, vocab]."""
    num_rows = logits.shape[0]
    token_ids, largest = logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows)
    find_largest(token_ids, largest, logits)
    if rows.size != num_rows:  # several from one row are the same
        (of_samples,) = upload(logits.device, rows)
        token_ids = token_ids[of_samples]
    return Drawn(token_ids, largest, rows, None, NO_SAMPLES)


def find_largest(token_ids: torch.Tensor, largest: torch.Tensor, logits: torch.Tensor) -> None:
    """Fills the first token i64[R] that has the largest of each row of `logits`, and that f32[R]: kernels alone."""
    kernels_for(logits.device).most_likely(token_ids, largest, logits)


def draw(logits: torch.Tensor, params: SamplingRows, draws: Draws, raw_logits: torch.Tensor | None = None) -> Drawn:
    """Draws N tokens from `logits` f32[R, vocab]; `params` has one entry a row. `logits` is left as it is.

    Logprobs are those of `raw_logits`, the model's own; None: `logits` are.
    """
    wants = params.wants_logprobs[draws.rows]
    with_logprobs = np.flatnonzero(wants)
    rows, asking, *columns = upload(logits.device, draws.rows, with_logprobs, *draw_columns(params, draws))
    maxima = RowMaxima.of(logits)
    token_ids = draw_tokens(logits, maxima, rows, *columns, is_filtered=has_filters(params, logits.shape[1]))
    logprobs = None
    if with_logprobs.size:
        if raw_logits is not None and raw_logits is not logits:
            logits, maxima_of_raw = raw_logits, RowMaxima.of(raw_logits)
        else:
            maxima_of_raw = maxima
        num_top = params.num_logprobs[draws.rows[with_logprobs]]
        asked = (rows, token_ids) if wants.all() else (rows[asking], token_ids[asking])
        logprobs = find_logprobs(logits, maxima_of_raw, *asked, num_top)
    return Drawn(token_ids, maxima.largest, draws.rows, logprobs, with_logprobs)


def draw_columns(params: SamplingRows, draws: Draws) -> tuple[npt.NDArray[Any], ...]:
    """What `draw_tokens` takes: temperature, min_p f32[R], top_k i64[R], top_p f32[R], of each row; seeds, sequence
    indices, positions i64[N], of each draw."""
    seeds = params.seed[draws.rows].view(np.int64)
    return params.temperature, params.min_p, params.top_k, params.top_p, seeds, draws.sequence_index, draws.position


def has_filters(params: SamplingRows, vocab_size: int) -> bool:
    """Whether any row draws from fewer tokens than there are."""
    is_filtered = (params.min_p > 0) | ((params.top_k > 0) & (params.top_k < vocab_size)) | (params.top_p < 1)
    return bool((is_filtered & (params.temperature > 0)).any())


def draw_tokens(
    logits: torch.Tensor,
    maxima: RowMaxima,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    sequence_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    is_filtered: bool,
) -> torch.Tensor:
    """i64[N], from `rows` i64[N] of `logits` and the columns of `draw_columns`, on their device: kernels alone. Unless
    `is_filtered`, filters are passed over."""
    kernels, smallest = kernels_for(logits.device), torch.full_like(maxima.largest, -torch.inf)
    if is_filtered:
        kernels.kept_range(smallest, logits, maxima.of_chunks, maxima.largest, temperature, min_p, top_k, top_p)
    token_ids = torch.empty_like(rows)
    kernels.draw_tokens(
        token_ids,
        logits,
        maxima.of_chunks,
        maxima.largest,
        smallest,
        temperature,
        rows,
        seeds,
        sequence_indices,
        positions,
    )
    return token_ids


def _spread(found: Logprobs, samples: npt.NDArray[np.intp], size: int) -> Logprobs:
    """`found` of `samples`, and zeros for the others of `size` samples."""
    drawn = np.zeros(size, np.float32)
    ranks, top_counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    drawn[samples], ranks[samples], top_counts[samples] = found.drawn, found.ranks, found.top_counts
    return Logprobs(drawn, ranks, top_counts, found.top_token_ids, found.top_logprobs)
