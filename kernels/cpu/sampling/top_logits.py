"""The few largest logits of rows, in order, without sorting the rows; see `kernels.oracles.reference.top_logits`.

The k-th largest of the chunks' maxima bounds the k-th largest logit from below, because each of k chunks has a logit
that large: only what reaches it is looked at and sorted.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.sampling.selection import kth_largest, position_of, sort_falling, sort_key
from kernels.oracles.reference_sampling import CHUNK_SIZE


def top_logits(
    token_ids: torch.Tensor, values: torch.Tensor, logits: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor
) -> None:
    """See `kernels.oracles.reference.top_logits`; all contiguous."""
    _top_logits(*(each.numpy() for each in (token_ids, values, logits, maxima, rows)), num_threads())


@njit(nogil=True, parallel=True, cache=True)
def _top_logits(token_ids, values, logits, maxima, rows, num_threads):  # type: ignore[no-untyped-def]
    (count, k), vocab_size, num_chunks = token_ids.shape, logits.shape[1], maxima.shape[1]
    threads = min(num_threads, count)
    for thread in prange(threads):
        keys, bounds = np.empty(vocab_size, np.int64), np.empty(num_chunks, np.float32)
        for sample in range(thread, count, threads):
            x, of_chunks = logits[rows[sample]], maxima[rows[sample]]
            if np.isnan(of_chunks).any():
                token_ids[sample], values[sample] = 0, np.nan
                continue
            bounds[:] = of_chunks
            bound = kth_largest(bounds, k) if k < num_chunks else np.float32(-np.inf)
            num_keys = 0
            for chunk in range(num_chunks):
                if of_chunks[chunk] >= bound:
                    for i in range(chunk * CHUNK_SIZE, min((chunk + 1) * CHUNK_SIZE, vocab_size)):
                        keys[num_keys] = sort_key(x[i], i)  # overwritten by the next, unless it is counted
                        num_keys += x[i] >= bound
            sort_falling(keys[:num_keys])
            for i in range(k):
                token_ids[sample, i] = position_of(keys[i])
                values[sample, i] = x[token_ids[sample, i]]
