"""RMSNorm, with the residual sum in the same pass; see `kernels.oracles.reference.rms_norm`.

    out = y / sqrt(mean(y^2) + eps) * weight,  y = x or x + residual;  weight + offset in place of weight

Rows are independent and each is summed by the same code in the same order: a row's result depends on nothing else.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import FEW_NUMBERS, num_threads
from kernels.cpu.vectors.numbers import element_of, from_float32, lines, to_float32


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """See `kernels.oracles.reference.rms_norm`; all contiguous."""
    _rms_norm(
        element_of(out, x, weight),
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        x.shape[0],
        x.shape[1],
        np.float32(eps),
        np.float32(weight_offset),
        num_threads(),
    )


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _sum_of_squares(y):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(y.size):
        total += y[i] * y[i]
    return total


@njit(nogil=True)
def norm_rows(  # type: ignore[no-untyped-def]
    thread, threads, element, out_address, x_address, weight_address, residual_address, count, size, eps, weight_offset
):
    """Rows `thread`, `thread + threads`, ... of `rms_norm`: [count, size], contiguous, at addresses; 0: no residual."""
    out = lines(out_address, element, count, size)
    x = lines(x_address, element, count, size)
    residual = lines(residual_address, element, count, size)
    weight = lines(weight_address, element, 1, size)[0]
    y = np.empty(size, dtype=np.float32)
    for t in range(thread, count, threads):
        row, target = x[t], out[t]
        if residual_address != 0:
            rest = residual[t]
            for i in range(size):
                # Rounded before it is normed, as the residual that goes on is.
                rest[i] = from_float32(to_float32(row[i]) + to_float32(rest[i]), rest[i])
                y[i] = to_float32(rest[i])
        else:
            for i in range(size):
                y[i] = to_float32(row[i])
        scale = np.float32(1.0) / np.sqrt(_sum_of_squares(y) / np.float32(size) + eps)
        if weight_offset != np.float32(0.0):
            for i in range(size):
                target[i] = from_float32(y[i] * scale * (to_float32(weight[i]) + weight_offset), target[i])
        else:
            for i in range(size):
                normed = to_float32(from_float32(y[i] * scale, target[i]))
                target[i] = from_float32(normed * to_float32(weight[i]), target[i])


@njit(nogil=True, parallel=True)
def _together(  # type: ignore[no-untyped-def]
    element, out_address, x_address, weight_address, residual_address, count, size, eps, weight_offset, num_threads
):
    threads = min(num_threads, count)
    for thread in prange(threads):
        norm_rows(
            thread,
            threads,
            element,
            out_address,
            x_address,
            weight_address,
            residual_address,
            count,
            size,
            eps,
            weight_offset,
        )


@njit(nogil=True, cache=True)
def _rms_norm(  # type: ignore[no-untyped-def]
    element, out_address, x_address, weight_address, residual_address, count, size, eps, weight_offset, num_threads
):
    if count * size <= FEW_NUMBERS:
        norm_rows(
            0, 1, element, out_address, x_address, weight_address, residual_address, count, size, eps, weight_offset
        )
    else:
        _together(
            element,
            out_address,
            x_address,
            weight_address,
            residual_address,
            count,
            size,
            eps,
            weight_offset,
            num_threads,
        )
