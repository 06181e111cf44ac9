"""Sums of products that one instruction makes where the processor has it; words of LLVM code as in `vector_code`.

Bytes: sixteen sums of four products each. What a processor has decides how they are made (`DOT_KINDS`); being exact
integers they are the same everywhere. Pairs of bfloat16: only where there is an instruction (`processor.HAS_PAIRS`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu.vectors.processor import features
from kernels.cpu.vectors.vector_code import F32X16, I32, I32X16, LANES, call, constant, shuffle

# The type of a number says which code is compiled, as elements do in `numbers`.
DOT_KINDS = {"512 bits": np.int8(0), "256 bits": np.int16(0), "portable": np.int32(0)}
_BYTES = 4  # of a lane
_I32X8 = ir.VectorType(I32, LANES // 2)


class _BFloat16(ir.Type):
    """LLVM's type of that name, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


def dot_kind_of_this_cpu() -> str:
    """The fastest of `DOT_KINDS` that the processor has."""
    if "avx512vnni" in features():
        return "512 bits"
    return "256 bits" if "avxvnni" in features() else "portable"


def dot_bytes(builder: Any, kind: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """sums i32[16] + in each lane four products of an unsigned byte of `weights` and a signed one of `inputs`.

    kind: the numba type of one of `DOT_KINDS`.
    """
    if kind == types.int8:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, sums, weights, inputs)
    if kind == types.int16:
        halves = []
        for first in (0, LANES // 2):
            lanes = list(range(first, first + LANES // 2))
            factors = [shuffle(builder, vector, vector, lanes) for vector in (sums, weights, inputs)]
            halves.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", _I32X8, *factors))
        low, high = halves
        return shuffle(builder, low, high, list(range(LANES)))
    # LLVM sees that all factors fit 16 bits and takes the instruction for two such products, where there is one.
    for byte in range(_BYTES):
        weight = builder.and_(builder.lshr(weights, constant(I32X16, 8 * byte)), constant(I32X16, 255))
        value = builder.ashr(builder.shl(inputs, constant(I32X16, 24 - 8 * byte)), constant(I32X16, 24))
        sums = builder.add(sums, builder.mul(weight, value))
    return sums


def dot_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums f32[16] + in each lane both products of a pair of bfloat16 of a and one of b, 32 bits each.

    The instruction takes denormal numbers for 0, and rounds to nearest whatever the thread has set.
    """
    pairs = builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, sums, *pairs)
