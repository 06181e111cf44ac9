"""Memory and numbers inside compiled kernels: tensors as lines of elements, half precision as 16 bits, an exponential.

Launchers hand a tensor over as its address and the distance between its rows, in elements: a part of a fused projection
needs no copy, and a kernel is compiled once a type, not once a layout. numba knows neither bfloat16 nor float16 on a
CPU; such elements are uint16 and int16 here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.np.arrayobj import populate_array

from kernels.cpu.vectors import vector_code
from kernels.cpu.vectors.vector_code import intrinsic

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # exact in few bits, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)

INT32, INT64, FLOAT32, BFLOAT16 = np.int32(0), np.int64(0), np.float32(0), np.uint16(0)

_ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_STORED_ELEMENTS = _ELEMENTS | {torch.float16: np.int16(0)}


def element_of(*tensors: torch.Tensor) -> Any:
    """A number of the type that stands for the tensors' one dtype in a kernel: float32, or uint16 for bfloat16."""
    dtype = tensors[0].dtype
    if dtype not in _ELEMENTS or not _have(dtype, tensors):
        raise TypeError(f"CPU kernels compute float32 or bfloat16, not {', '.join(str(t.dtype) for t in tensors)}")
    return _ELEMENTS[dtype]


def stored_element_of(*tensors: torch.Tensor) -> Any:
    """Of a cache, which may be float16 too, and of another type than what is computed: int16 for float16.

    Asking for each line's type at run time instead made a decode step's attention 2.7 times slower.
    """
    dtype = tensors[0].dtype
    if dtype not in _STORED_ELEMENTS or any(tensor.dtype != dtype for tensor in tensors):
        raise TypeError(f"a cache is float32, bfloat16 or float16, not {', '.join(str(t.dtype) for t in tensors)}")
    return _STORED_ELEMENTS[dtype]


def _have(dtype: torch.dtype, tensors: tuple[torch.Tensor, ...]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - three times as fast as `all` over a generator, ten times a layer
        if tensor.dtype != dtype:
            return False
    return True


@intrinsic
def _pointer(typing_context: Any, address: Any, element: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.intp, element), generate


@njit(nogil=True, inline="always")
def lines(address: Any, element: Any, count: Any, stride: Any) -> Any:
    """The tensor at `address` as an array [count, stride]; past a line's own elements nothing may be touched."""
    return carray(_pointer(address, element), (count, stride))


@njit(nogil=True, inline="always")
def address_of(array: Any) -> Any:
    """Where an array's elements begin, int64; the array has to be in use for as long as this is.

    numpy says it without a sign. A function that is given one address with a sign and one without is compiled twice,
    and where they meet numba makes them float64.
    """
    return np.int64(array.ctypes.data)


@intrinsic
def borrowed(typing_context: Any, array: Any) -> Any:
    """The same array, whose references nobody counts: its owner has to be given to `keep` after the last use.

    A compiled function counts those of its arguments and of slices, with atomic operations: 11 ns an array and call on
    a Zen 5 core.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        owner, view = (context.make_array(kind) for kind in (signature.args[0], signature.return_type))
        lent, result = owner(context, builder, arguments[0]), view(context, builder)
        populate_array(result, lent.data, lent.shape, lent.strides, lent.itemsize, meminfo=None)
        return result._getvalue()

    return array(array), generate


@intrinsic
def keep(typing_context: Any, owner: Any) -> Any:
    """Does nothing, but as a use of the array: it is not freed before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(owner), generate


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


@intrinsic
def to_float32(typing_context: Any, element: Any) -> Any:
    """An element as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return vector_code.to_float32(builder, arguments[0], element)

    return types.float32(element), generate


@intrinsic
def from_float32(typing_context: Any, value: Any, like: Any) -> Any:
    """`value` float32 as an element of `like`'s type, rounded to nearest, ties to even (bfloat16: finite values)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return vector_code.from_float32(builder, arguments[0], like)

    return like(types.float32, like), generate


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
