"""float64 inside compiled kernels: an exponential that compiles to vector instructions, and its sum over a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kernels.cpu.sampling.numbers import bits_of, float64_of_bits

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490  # the upper 32 bits, so that n * _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDER = 6755399441055744.0  # 1.5 * 2^52: adding it leaves the nearest integer in the low bits


@njit(nogil=True, inline="always")
def exp64(x: Any) -> Any:
    """e^x for x <= 0 within 2 ulp, 0 below -708: the Taylor series to the 13th term around the nearest n ln 2.

    Half of ln 2 to the 14th, over 14!, is below 2^-57.
    """
    inside = max(x, -708.0)
    shifted = inside * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    p = 1.6059043836821613e-10
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 0.0001984126984126984
    p = p * r + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    power = float64_of_bits((bits_of(shifted) + np.int64(1023)) << np.int64(52))
    return (p * r * r + r + 1.0) * power if x >= -708.0 else 0.0


@njit(nogil=True, fastmath={"contract"})
def weigh(weights, x, first, last, largest, smallest, inverse_temperature):  # type: ignore[no-untyped-def]
    """weights[i] = exp((x[first + i] - largest) / temperature), 0 for an x below `smallest`."""
    for i in range(last - first):
        value = x[first + i]
        weight = exp64((np.float64(value) - largest) * inverse_temperature)
        weights[i] = weight if value >= smallest else 0.0
