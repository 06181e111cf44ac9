"""Counter-based random numbers in compiled code; see `kernels.oracles.reference.uniforms` for the generator."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu import runtime  # noqa: F401 - sets where compiled code is kept

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def uniforms(seeds: torch.Tensor, sequence_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See `kernels.oracles.reference.uniforms`."""
    numbers = torch.empty(seeds.shape, dtype=torch.float64)
    _uniforms(numbers.numpy(), *(column.numpy().view(np.uint64) for column in (seeds, sequence_indices, positions)))
    return numbers


@njit(nogil=True)
def uniform(seed, sequence_index, position):  # type: ignore[no-untyped-def]
    """One number in [0, 1); all three uint64."""
    c0, c1, c2, c3 = position & _LOW, position >> _32, sequence_index & _LOW, sequence_index >> _32
    k0, k1 = seed & _LOW, seed >> _32
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.float64((c0 >> np.uint64(5)) * np.uint64(1 << 26) + (c1 >> np.uint64(6))) * 2.0**-53


@njit(nogil=True, cache=True)
def _uniforms(numbers, seeds, sequence_indices, positions):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        numbers[i] = uniform(seeds[i], sequence_indices[i], positions[i])
