"""Low-rank adapters of many requests in one batch; see `kernels.oracles.reference.lora_shrink` and `lora_expand`.

Each row is multiplied by itself, by float32 numbers whatever its own type is, in the same order in any company. `b`
lies [adapters, rank, outputs] in memory, so that a row's outputs are summed side by side.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.vectors.numbers import FLOAT32, element_of, from_float32, lines, to_float32


def num_segments(size: int) -> int:
    """Of `between` for rows of `size` elements."""
    return 1


def lora_shrink(between: torch.Tensor, x: torch.Tensor, a: torch.Tensor, adapters: torch.Tensor) -> None:
    """See `kernels.oracles.reference.lora_shrink`; `a` is contiguous float32, x at any stride.

    Raises ValueError for shapes that do not fit.
    """
    (count, size), (_, rank, depth) = x.shape, a.shape
    if between.shape != (1, count, rank) or depth != size or not (between.is_contiguous() and a.is_contiguous()):
        raise ValueError(f"between {tuple(between.shape)}, x {tuple(x.shape)} and a {tuple(a.shape)} do not fit")
    addresses = between.data_ptr(), x.data_ptr(), a.data_ptr(), adapters.data_ptr()
    _shrink(element_of(x), *addresses, count, x.stride(0), size, rank, len(a), num_threads())


def lora_expand(
    out: torch.Tensor, between: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor, scales: torch.Tensor
) -> None:
    """See `kernels.oracles.reference.lora_expand`; `b` is float32 and its transpose contiguous, out at any stride.

    Raises ValueError for shapes that do not fit.
    """
    (count, size), (_, outputs, rank) = out.shape, b.shape
    if between.shape != (1, count, rank) or outputs != size or not b.mT.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)}, between {tuple(between.shape)} and b {tuple(b.shape)} do not fit")
    addresses = out.data_ptr(), between.data_ptr(), b.data_ptr(), adapters.data_ptr(), scales.data_ptr()
    _expand(element_of(out), *addresses, count, out.stride(0), size, rank, len(b), num_threads())


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _dot(x, y):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@njit(nogil=True, parallel=True, cache=True)
def _shrink(  # type: ignore[no-untyped-def]
    element,
    between_address,
    x_address,
    a_address,
    adapters_address,
    count,
    x_stride,
    size,
    rank,
    num_adapters,
    num_threads,
):
    between = lines(between_address, FLOAT32, count, rank)
    x = lines(x_address, element, count, x_stride)
    a = lines(a_address, FLOAT32, num_adapters * rank, size)
    adapters = lines(adapters_address, np.int32(0), 1, count)[0]
    threads = min(num_threads, count)
    for thread in prange(threads):
        row = np.empty(size, dtype=np.float32)
        for t in range(thread, count, threads):
            first = adapters[t] * rank
            if first < 0:
                continue
            for i in range(size):
                row[i] = to_float32(x[t, i])
            for r in range(rank):
                between[t, r] = _dot(row, a[first + r])


@njit(nogil=True, parallel=True, cache=True, fastmath={"contract"})
def _expand(  # type: ignore[no-untyped-def]
    element,
    out_address,
    between_address,
    b_address,
    adapters_address,
    scales_address,
    count,
    out_stride,
    size,
    rank,
    num_adapters,
    num_threads,
):
    out = lines(out_address, element, count, out_stride)
    between = lines(between_address, FLOAT32, count, rank)
    b = lines(b_address, FLOAT32, num_adapters * rank, size)
    adapters = lines(adapters_address, np.int32(0), 1, count)[0]
    scales = lines(scales_address, FLOAT32, 1, num_adapters)[0]
    threads = min(num_threads, count)
    for thread in prange(threads):
        added = np.empty(size, dtype=np.float32)
        for t in range(thread, count, threads):
            adapter = adapters[t]
            if adapter < 0:
                continue
            added[:] = np.float32(0.0)
            for r in range(rank):
                factor, column = between[t, r], b[adapter * rank + r]
                for i in range(size):
                    added[i] += factor * column[i]
            scale, target = scales[adapter], out[t]
            for i in range(size):
                target[i] = from_float32(to_float32(target[i]) + scale * added[i], target[i])
