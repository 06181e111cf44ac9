"""GELU, alone or as the gate of a layer; see `kernels.oracles.reference.gelu` and `gelu_and_mul`.

    gelu(x) = x (1 + erf(x / sqrt(2))) / 2;  approximately x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)

The second is the usual x (1 + tanh u) / 2 written with one exponential. Every element is computed by itself.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.runtime import num_threads
from kernels.cpu.vectors.numbers import element_of, exp, from_float32, lines, to_float32

_TWICE = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_CUBIC = np.float32(0.044715)
_HALF_ROOT = math.sqrt(0.5)


def gelu(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu`; both contiguous."""
    shape = out.shape
    _gelu(element_of(out, x), out.data_ptr(), x.data_ptr(), *shape, False, is_approximate, num_threads())


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu_and_mul`; both contiguous."""
    shape = out.shape
    _gelu(element_of(out, x), out.data_ptr(), x.data_ptr(), *shape, True, is_approximate, num_threads())


@njit(nogil=True, parallel=True, cache=True, fastmath={"contract"})
def _gelu(  # type: ignore[no-untyped-def]
    element, out_address, x_address, count, size, is_gated, is_approximate, num_threads
):
    width = 2 * size if is_gated else size
    out = lines(out_address, element, count, size)
    x = lines(x_address, element, count, width)
    threads = min(num_threads, count)
    for thread in prange(threads):
        activated = np.empty(size, dtype=np.float32)
        for t in range(thread, count, threads):
            target, gate, up = out[t], x[t, :size], x[t, width - size :]
            if is_approximate:
                for i in range(size):
                    g = to_float32(gate[i])
                    activated[i] = g / (np.float32(1.0) + exp(-_TWICE * (g + _CUBIC * g * g * g)))
            else:
                for i in range(size):
                    g = to_float32(gate[i])
                    activated[i] = g * np.float32(0.5 * (1.0 + math.erf(g * _HALF_ROOT)))
            if is_gated:
                for i in range(size):
                    activated[i] *= to_float32(up[i])
            for i in range(size):
                target[i] = from_float32(activated[i], target[i])
