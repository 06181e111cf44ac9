"""The gate of a SwiGLU layer: out = silu(gate) * up, silu(g) = g / (1 + e^-g); see `reference.silu_and_mul`."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import FEW_NUMBERS, num_threads
from kernels.cpu.vectors.numbers import element_of, exp, from_float32, lines, to_float32


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """See `kernels.oracles.reference.silu_and_mul`; both contiguous."""
    _silu_and_mul(element_of(out, x), out.data_ptr(), x.data_ptr(), *out.shape, num_threads())


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def activate_rows(thread, threads, element, out_address, x_address, count, size):  # type: ignore[no-untyped-def]
    """Rows `thread`, `thread + threads`, ... of out [count, size] from x [count, 2 size], contiguous, at addresses."""
    # numpy's errors: a division that may raise is not vectorised, 32 rows of 1,536 then take 140 us in place of 10.
    out = lines(out_address, element, count, size)
    x = lines(x_address, element, count, 2 * size)
    for t in range(thread, count, threads):
        target, gate, up = out[t], x[t, :size], x[t, size:]
        for i in range(size):
            g = to_float32(gate[i])
            target[i] = from_float32(g / (np.float32(1.0) + exp(-g)) * to_float32(up[i]), target[i])


@njit(nogil=True, parallel=True)
def _together(element, out_address, x_address, count, size, num_threads):  # type: ignore[no-untyped-def]
    threads = min(num_threads, count)
    for thread in prange(threads):
        activate_rows(thread, threads, element, out_address, x_address, count, size)


@njit(nogil=True, cache=True)
def _silu_and_mul(element, out_address, x_address, count, size, num_threads):  # type: ignore[no-untyped-def]
    if count * size <= FEW_NUMBERS:
        activate_rows(0, 1, element, out_address, x_address, count, size)
    else:
        _together(element, out_address, x_address, count, size, num_threads)
