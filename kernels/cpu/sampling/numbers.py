"""The bits of numbers inside compiled code, and an exponential."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import extending, njit, types

from kernels.cpu import runtime  # noqa: F401 - sets where compiled code is kept

intrinsic: Any = extending.intrinsic  # its types are those of the implementation, not of the call

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # exact in few bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)


@intrinsic
def bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32 as int32, of a float64 as int64."""
    return _same_bits({types.float32: types.int32, types.float64: types.int64}[number], number)


@intrinsic
def float32_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits; of a wider integer the lowest, as numba makes int64 of sums of int32."""
    return _same_bits(types.float32, types.int32)


@intrinsic
def float64_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float64 that has these 64 bits."""
    return _same_bits(types.float64, types.int64)


def _same_bits(result: Any, given: Any) -> Any:
    """What an intrinsic returns that only takes bits for another type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(result))

    return result(given), generate


@njit(fastmath={"contract"}, nogil=True, inline="always")
def exp(x: Any) -> Any:
    """e^x in float32 within 2 ulp, 0 below -87, e^88 above 88; a polynomial as in Cephes `expf`."""
    inside = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(inside * LOG2_E + np.float32(0.5))
    r = inside - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = float32_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + np.float32(1.0)) * power if x >= np.float32(-87.0) else np.float32(0.0)
