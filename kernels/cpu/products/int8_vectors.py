"""Vectors of sixteen 32-bit numbers as LLVM code, and the products of bytes that int8 kernels are made of.

What a processor has decides how four products of bytes and their sum are done (`DOT_KINDS`); the numbers are the same.
Addresses are integers, as launchers hand them over; nothing is assumed of their alignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.vectors.float_tile import CACHE_LINE_BYTES
from kernels.cpu.vectors.processor import features
from kernels.int8_weight import PANEL, QUAD

# The type of a number says which code is compiled, as elements do in `kernels.cpu.vectors.numbers`.
DOT_KINDS = {"512 bits": np.int8(0), "256 bits": np.int16(0), "portable": np.int32(0)}

INTEGER, FLOAT = ir.IntType(32), ir.FloatType()
INTEGERS, FLOATS = ir.VectorType(INTEGER, PANEL), ir.VectorType(FLOAT, PANEL)
_HALF = ir.VectorType(INTEGER, PANEL // 2)
_SHORTS, _HALF_FLOATS = ir.VectorType(ir.IntType(16), PANEL), ir.VectorType(ir.HalfType(), PANEL)


def dot_kind_of_this_cpu() -> str:
    """The fastest of `DOT_KINDS` that the processor has."""
    if "avx512vnni" in features():
        return "512 bits"
    return "256 bits" if "avxvnni" in features() else "portable"


def dot(builder: Any, kind: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """sums i32[16], to each added four products of an unsigned byte of a weight and a signed one of an input."""
    if kind == types.int8:
        return builder.call(_vpdpbusd(builder, INTEGERS, "512"), [sums, weights, inputs])
    if kind == types.int16:
        function = _vpdpbusd(builder, _HALF, "256")
        halves = []
        for lanes in (range(PANEL // 2), range(PANEL // 2, PANEL)):
            chosen = ir.Constant(_HALF, list(lanes))
            halves.append(
                builder.call(function, [builder.shuffle_vector(x, x, chosen) for x in (sums, weights, inputs)])
            )
        return builder.shuffle_vector(*halves, ir.Constant(INTEGERS, list(range(PANEL))))
    # LLVM sees that all factors fit 16 bits and takes the instruction for two such products, where there is one.
    for byte in range(QUAD):
        weight = builder.and_(builder.lshr(weights, integers(8 * byte)), integers(255))
        value = builder.ashr(builder.shl(inputs, integers(24 - 8 * byte)), integers(24))
        sums = builder.add(sums, builder.mul(weight, value))
    return sums


def _vpdpbusd(builder: Any, vector: Any, width: str) -> Any:
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.x86.avx512.vpdpbusd.{width}"
    )


def integers(number: int) -> Any:
    """The number in all lanes."""
    return ir.Constant(INTEGERS, [number] * PANEL)


def floats(number: float) -> Any:
    """The number in all lanes."""
    return ir.Constant(FLOATS, [number] * PANEL)


def load(builder: Any, address: Any, kind: Any) -> Any:
    """A number or a vector."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, values: Any, address: Any) -> None:
    """A number or a vector."""
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=1)


def spread(builder: Any, address: Any, kind: Any) -> Any:
    """The number at an address in all lanes."""
    return spread_value(builder, load(builder, address, kind))


def spread_value(builder: Any, number: Any) -> Any:
    """A number in all lanes."""
    nothing = ir.Constant(ir.VectorType(number.type, PANEL), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, INTEGER(0)), nothing, integers(0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, f"llvm.fma.v{PANEL}f32", FLOATS, a, b, c)


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """What an intrinsic of LLVM gives."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def prefetch_lines(builder: Any, start: Any, first_line: Any, num_lines: Any, *, level: int = 2) -> None:
    """Has cache lines brought to this cache level, 1 or 2; they need not exist."""
    pointer, index = ir.IntType(8).as_pointer(), num_lines.type
    with cgutils.for_range(builder, num_lines) as loop:
        offset = builder.mul(builder.add(first_line, loop.index), index(CACHE_LINE_BYTES))
        place = builder.inttoptr(builder.add(start, offset), pointer)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), place, INTEGER(0), INTEGER(4 - level), INTEGER(1))


def load_halves(builder: Any, address: Any) -> Any:
    """Sixteen float16 as float32."""
    return builder.fpext(load(builder, address, _HALF_FLOATS), FLOATS)


def load_elements(builder: Any, address: Any, element: Any) -> Any:
    """Sixteen elements, float32 or bfloat16 (see `kernels.cpu.vectors.numbers`), as float32."""
    if element == types.float32:
        return load(builder, address, FLOATS)
    words = builder.zext(load(builder, address, _SHORTS), INTEGERS)
    return builder.bitcast(builder.shl(words, integers(16)), FLOATS)


def store_elements(builder: Any, values: Any, address: Any, element: Any) -> None:
    """The inverse; bfloat16 is rounded to nearest, ties to even, and the NaN that x86 makes stays one."""
    if element != types.float32:
        bits = builder.bitcast(values, INTEGERS)
        odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
        rounded = builder.add(builder.add(bits, integers(0x7FFF)), odd)
        values = builder.trunc(builder.lshr(rounded, integers(16)), _SHORTS)
    store(builder, values, address)
