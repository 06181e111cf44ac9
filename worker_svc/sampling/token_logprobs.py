"""Log probabilities of given tokens, and of the most likely ones beside them, from the model's own logits.

Found where the logits are, for as many top tokens a sample as any of its part wants; cut to what each wants on the
host. Where some samples want many and others few, these are two parts: to sort a vocabulary takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.select import kernels_for
from worker_svc.host.uploads import upload
from worker_svc.mirror.sampling_columns import WHOLE_VOCABULARY
from worker_svc.mirror.step_columns import Ints
from worker_svc.sampling.row_maxima import RowMaxima
from worker_svc.sampling.sampled import Logprobs

FEW = 64  # top tokens


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """The logprobs of M samples, on the device of the logits."""

    drawn: torch.Tensor  # f32[M]
    ranks: torch.Tensor  # i64[M]
    tops: tuple[torch.Tensor, ...]  # of each part in turn: ids i64[P, K], logprobs f32[P, K]
    parts: tuple[Ints, ...]  # [P] each, samples
    counts: Ints  # [M], how many top tokens a sample wants

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is to be copied to the host."""
        return self.drawn, self.ranks, *self.tops

    def on_host(self, arrays: tuple[npt.NDArray[Any], ...], is_bad: npt.NDArray[np.bool_]) -> Logprobs:
        """From copies of `tensors`. Those of rows that are not finite, and of `is_bad` [M], have no top tokens."""
        drawn, ranks, *tops = arrays
        counts = np.where(is_bad | np.isnan(drawn), 0, self.counts)
        return Logprobs(drawn, ranks, counts, *self.wanted_of(tops, counts))

    def wanted_of(
        self, tops: Sequence[npt.NDArray[Any]], counts: Ints
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The first counts[m] top tokens of each sample, from copies of `tops`: ids and logprobs, sample by sample."""
        starts = np.cumsum(counts) - counts
        token_ids, logprobs = np.empty(counts.sum(), np.int64), np.empty(counts.sum(), np.float32)
        for samples, of_ids, of_logprobs in zip(self.parts, tops[::2], tops[1::2], strict=True):
            places = np.arange(of_ids.shape[1])
            is_wanted = places < counts[samples, None]
            where = (starts[samples, None] + places)[is_wanted]
            token_ids[where], logprobs[where] = of_ids[is_wanted], of_logprobs[is_wanted]
        return token_ids, logprobs


def find_logprobs(
    logits: torch.Tensor,
    maxima: RowMaxima,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: npt.NDArray[np.integer],
) -> FoundLogprobs:
    """Log-softmax in float32 of token_ids[m] in row rows[m] of `logits`, with its rank and the top num_top[m].

    rows, token_ids i64[M]; num_top [M] may be WHOLE_VOCABULARY, or more than there is. A row that is not finite gives
    NaN and rank 1.
    """
    kernels, (count, vocab_size) = kernels_for(logits.device), (rows.shape[0], logits.shape[1])
    drawn, log_sums = logits.new_empty(count), logits.new_empty(count)
    ranks = torch.empty_like(token_ids)
    kernels.token_logprobs(drawn, ranks, log_sums, logits, maxima.largest, rows, token_ids)
    counts = np.where(num_top == WHOLE_VOCABULARY, vocab_size, np.minimum(num_top.astype(np.int64), vocab_size))
    parts, tops = _parts(counts), list[torch.Tensor]()
    for samples in parts:
        of_part, of_sums = rows, log_sums
        if samples.size < count:
            (which,) = upload(logits.device, samples)
            of_part, of_sums = rows[which], log_sums[which]
        most = int(counts[samples].max())
        top_token_ids, top_logprobs = token_ids.new_empty(samples.size, most), logits.new_empty(samples.size, most)
        kernels.top_logits(top_token_ids, top_logprobs, logits, maxima.of_chunks, of_part)
        top_logprobs -= maxima.largest[of_part, None]
        top_logprobs -= of_sums[:, None]
        tops += [top_token_ids, top_logprobs]
    return FoundLogprobs(drawn, ranks, tuple(tops), parts, counts)


def _parts(counts: Ints) -> tuple[Ints, ...]:
    """Samples that want few top tokens, and those that want many; neither is empty."""
    if int(counts.max(initial=0)) <= FEW:
        return (np.arange(counts.size),) if counts.any() else ()
    is_few = counts <= FEW
    parts = np.flatnonzero(is_few & (counts > 0)), np.flatnonzero(~is_few)
    return tuple(part for part in parts if part.size)


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.integer]
) -> Logprobs:
    """The logprobs of token_ids[r] in row r of `logits` f32[R, vocab], on the host; otherwise as `find_logprobs`."""
    maxima = RowMaxima.of(logits)
    rows, of_given = upload(logits.device, np.arange(len(token_ids)), token_ids)
    found = find_logprobs(logits, maxima, rows, of_given, num_top)
    return found.on_host(tuple(tensor.cpu().numpy() for tensor in found.tensors), np.zeros(len(token_ids), np.bool_))
