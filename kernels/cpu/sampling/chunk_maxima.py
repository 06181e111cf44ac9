"""The largest logit of every chunk of tokens, in one pass over the logits; see `reference.chunk_maxima`."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.oracles.reference_sampling import CHUNK_SIZE


def chunk_maxima(out: torch.Tensor, logits: torch.Tensor) -> None:
    """See `kernels.oracles.reference.chunk_maxima`; both contiguous."""
    _chunk_maxima(out.numpy(), logits.numpy(), num_threads())


@njit(nogil=True, fastmath={"nsz"})  # so that a maximum is one instruction
def largest_of_chunk(x, first):  # type: ignore[no-untyped-def]
    """Of a whole chunk of x f32[N] from `first` on; as if NaN were no number."""
    largest = x[first]
    for i in range(CHUNK_SIZE):
        value = x[first + i]
        largest = value if value > largest else largest
    return largest


@njit(nogil=True)
def has_nan(x):  # type: ignore[no-untyped-def]
    """Whether x f32[N] has a NaN; without a branch, so that many numbers are looked at together."""
    is_bad = False
    for i in range(x.size):
        is_bad |= x[i] != x[i]
    return is_bad


@njit(nogil=True, parallel=True, cache=True)
def _chunk_maxima(out, logits, num_threads):  # type: ignore[no-untyped-def]
    count, vocab_size = logits.shape
    num_whole = vocab_size // CHUNK_SIZE
    threads = min(num_threads, count)
    for thread in prange(threads):
        for row in range(thread, count, threads):
            x, maxima = logits[row], out[row]
            for chunk in range(num_whole):
                maxima[chunk] = largest_of_chunk(x, chunk * CHUNK_SIZE)
            if num_whole < maxima.size:
                maxima[num_whole] = x[num_whole * CHUNK_SIZE :].max()
            if has_nan(x):
                for i in range(vocab_size):
                    if np.isnan(x[i]):
                        maxima[i // CHUNK_SIZE] = np.nan
