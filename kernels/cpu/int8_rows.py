"""Rows of activations to eight bits, group by group of 32, as LLVM vector code.

    scale[g] = max_i |x[i]| / 127,   q[i] = round(x[i] / scale[g]),   over the 32 inputs of group g

A group that holds NaN or an infinity gets the scale NaN, and with it everything that is computed of the row. One whose
numbers are all below 1e-30 counts as zeros: 127 / max has to be finite.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils

from kernels.cpu.numbers import to_float32
from kernels.int8_weight import GROUP, PANEL, ZERO

intrinsic: Any = extending.intrinsic  # its types are those of the implementation, not of the call

_SMALLEST = 1e-30
_INFINITY_BITS = 0x7F800000  # those of NaN are larger
_BYTE, _INTEGER, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES, _INTEGERS, _FLOATS = (ir.VectorType(kind, PANEL) for kind in (_BYTE, _INTEGER, _FLOAT))


@njit(nogil=True)
def quantize_row(line, size, values, q, scales, sums, num_groups):  # type: ignore[no-untyped-def]
    """`size` elements of `line` to int8 at the address `q`; each group's scale and -128 times its sum of q likewise.

    `values` float32[32 num_groups] is room to work in, with zeros from `size` on.
    """
    part = line[:size]
    for i in range(size):
        values[i] = to_float32(part[i])
    _quantize_groups(values.ctypes.data, q, scales, sums, num_groups)


@intrinsic
def _quantize_groups(typing_context: Any, values: Any, q: Any, scales: Any, sums: Any, num_groups: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_start, q_start, scales_start, sums_start, count = arguments
        index = count.type

        def at(start: Any, offset: Any, kind: Any) -> Any:
            return builder.inttoptr(builder.add(start, offset), kind.as_pointer())

        def call(name: str, result: Any, *values: Any) -> Any:
            kind = ir.FunctionType(result, [value.type for value in values])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

        with cgutils.for_range(builder, count) as loop:
            first = builder.mul(loop.index, index(GROUP))
            places = [builder.add(first, index(offset)) for offset in range(0, GROUP, PANEL)]
            bits = []
            for place in places:
                source = at(values_start, builder.mul(place, index(4)), _INTEGERS)
                bits.append(builder.load(source, align=4))
            # As integers, the bits of magnitudes are ordered as these are.
            sizes = [builder.and_(each, _constant(0x7FFFFFFF)) for each in bits]
            most_of_two = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
            most_bits = call(f"llvm.vector.reduce.umax.v{PANEL}i32", _INTEGER, most_of_two)
            most = builder.bitcast(most_bits, _FLOAT)
            is_broken = builder.icmp_unsigned(">=", most_bits, _INTEGER(_INFINITY_BITS))
            is_zero = builder.fcmp_unordered("<", most, _FLOAT(_SMALLEST))  # so for NaN, too
            factor = builder.select(builder.or_(is_broken, is_zero), _FLOAT(0.0), builder.fdiv(_FLOAT(127.0), most))
            scale = builder.select(is_zero, _FLOAT(0.0), builder.fdiv(most, _FLOAT(127.0)))
            scale = builder.select(is_broken, _FLOAT(math.nan), scale)
            kept = builder.sext(builder.not_(is_broken), _INTEGER)  # no number is made of NaN
            total = None
            for place, each in zip(places, bits, strict=True):
                number = builder.bitcast(builder.and_(each, _spread(builder, kept)), _FLOATS)
                scaled = builder.fmul(number, _spread(builder, factor))
                quantized = builder.fptosi(call(f"llvm.rint.v{PANEL}f32", _FLOATS, scaled), _INTEGERS)
                total = quantized if total is None else builder.add(total, quantized)
                builder.store(builder.trunc(quantized, _BYTES), at(q_start, place, _BYTES), align=1)
            sum_ = call(f"llvm.vector.reduce.add.v{PANEL}i32", _INTEGER, total)
            number = builder.mul(loop.index, index(4))
            builder.store(scale, at(scales_start, number, _FLOAT))
            builder.store(builder.mul(sum_, _INTEGER(-ZERO)), at(sums_start, number, _INTEGER))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


def _constant(number: int) -> Any:
    return ir.Constant(_INTEGERS, [number] * PANEL)


def _spread(builder: Any, scalar: Any) -> Any:
    """The scalar in all lanes."""
    vector = ir.VectorType(scalar.type, PANEL)
    nothing = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, scalar, _INTEGER(0)), nothing, _constant(0))
