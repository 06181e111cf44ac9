"""The first of each row's largest logits; see `kernels.oracles.reference.most_likely`.

A row is read in chunks: only the one with the largest maximum is looked through for the token. One row is read by the
thread that calls: 49,152 logits take 12 us, having a second thread join 3 to 5.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.sampling.chunk_maxima import has_nan, largest_of_chunk
from kernels.oracles.reference_sampling import CHUNK_SIZE


def most_likely(token_ids: torch.Tensor, largest: torch.Tensor, logits: torch.Tensor) -> None:
    """See `kernels.oracles.reference.most_likely`; all contiguous."""
    _most_likely(token_ids.numpy(), largest.numpy(), logits.numpy(), num_threads())


@njit(nogil=True)
def _first_largest(x):  # type: ignore[no-untyped-def]
    """(token, its logit); NaN, or an infinity, with token 0."""
    num_whole = x.size // CHUNK_SIZE
    begin, largest = num_whole * CHUNK_SIZE, np.float32(-np.inf)
    for chunk in range(num_whole):
        value = largest_of_chunk(x, chunk * CHUNK_SIZE)
        if value > largest:
            begin, largest = chunk * CHUNK_SIZE, value
    for i in range(num_whole * CHUNK_SIZE, x.size):  # the last chunk may be shorter
        if x[i] > largest:
            begin, largest = i, x[i]
    if has_nan(x):
        return 0, np.float32(np.nan)
    if not np.isfinite(largest):
        return 0, largest
    while x[begin] < largest:
        begin += 1
    return begin, largest


@njit(nogil=True)
def _rows(thread, threads, token_ids, largest, logits):  # type: ignore[no-untyped-def]
    for row in range(thread, logits.shape[0], threads):
        token_ids[row], largest[row] = _first_largest(logits[row])


@njit(nogil=True, parallel=True)
def _together(token_ids, largest, logits, threads):  # type: ignore[no-untyped-def]
    for thread in prange(threads):
        _rows(thread, threads, token_ids, largest, logits)


@njit(nogil=True, cache=True)
def _most_likely(token_ids, largest, logits, num_threads):  # type: ignore[no-untyped-def]
    threads = min(num_threads, logits.shape[0])
    if threads <= 1:
        _rows(0, 1, token_ids, largest, logits)
    else:
        _together(token_ids, largest, logits, threads)
