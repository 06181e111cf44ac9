"""Log probabilities of given tokens, and of the most likely ones beside them, from the model's own logits.

Found where the logits are, for as many top tokens a sample as any of them wants; cut to what each wants on the host.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """The logprobs of M samples, on the device of the logits."""

    tensors: tuple[torch.Tensor, ...]  # drawn f32[M], ranks i64[M], top ids i64[M, K], top logprobs f32[M, K]
    counts: Ints  # [M], how many of K a sample wants

    def on_host(self, arrays: tuple[npt.NDArray[Any], ...], is_bad: npt.NDArray[np.bool_]) -> Logprobs:
        """From copies of `tensors`. Those of rows that are not finite, and of `is_bad` [M], have no top tokens."""
        drawn, ranks, top_token_ids, top_logprobs = arrays
        counts = np.where(is_bad | np.isnan(drawn), 0, self.counts)
        is_wanted = np.arange(top_token_ids.shape[1]) < counts[:, None]
        return Logprobs(drawn, ranks, counts, top_token_ids[is_wanted], top_logprobs[is_wanted])


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
    most = int(counts.max(initial=0))
    top_token_ids, top_logprobs = token_ids.new_empty(count, most), logits.new_empty(count, most)
    if most:
        kernels.top_logits(top_token_ids, top_logprobs, logits, maxima.of_chunks, rows)
        top_logprobs -= maxima.largest[rows, None]
        top_logprobs -= log_sums[:, None]
    return FoundLogprobs((drawn, ranks, top_token_ids, top_logprobs), counts)


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.integer]
) -> Logprobs:
    """The logprobs of token_ids[r] in row r of `logits` f32[R, vocab], on the host; otherwise as `find_logprobs`."""
    maxima = RowMaxima.of(logits)
    rows, of_given = upload(logits.device, np.arange(len(token_ids)), token_ids)
    found = find_logprobs(logits, maxima, rows, of_given, num_top)
    return found.on_host(tuple(tensor.cpu().numpy() for tensor in found.tensors), np.zeros(len(token_ids), np.bool_))
