"""Words of LLVM vector code for intrinsics: loads, stores and transposes of vectors of 16 float32 numbers.

Each function appends instructions to a builder, while a kernel is compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

CACHE_LINE_BYTES = 64
LANES = 16  # float32 numbers of one AVX-512 register; LLVM splits them on narrower machines

VECTOR = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class _BFloat16(ir.Type):
    """LLVM's type of that name, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


def element(context: Any, builder: Any, signature: Any, arguments: Any, position: int) -> Any:
    """Pointer to element `arguments[position + 1]` of the array `arguments[position]`."""
    array = context.make_array(signature.args[position])(context, builder, arguments[position])
    return builder.gep(array.data, [arguments[position + 1]])


def at(builder: Any, start: Any, offset: Any) -> Any:
    return builder.gep(start, [offset])


def load(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, VECTOR.as_pointer()), align=4)


def load_wide(builder: Any, place: Any, kind: Any) -> Any:
    """16 elements of a numba type as float32; pairs of bfloat16, which are uint32, as they are."""
    if kind in (types.float32, types.uint32):
        return load(builder, place)
    halves = builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=2)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), ir.Constant(WORDS, [16] * LANES)), VECTOR)


def prefetch_bytes(builder: Any, start: Any, num_bytes: int, level: int = 2) -> None:
    """Ask for the lines of so many bytes, to have them in the first or second cache level."""
    byte, word = ir.IntType(8), ir.IntType(32)
    start = builder.bitcast(start, byte.as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word]), "llvm.prefetch.p0"
    )
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        builder.call(function, [at(builder, start, word(offset)), word(0), word(4 - level), word(1)])


def store(builder: Any, value: Any, place: Any) -> None:
    builder.store(value, builder.bitcast(place, VECTOR.as_pointer()), align=4)


def splat(builder: Any, scalar: Any) -> Any:
    single = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, ir.Constant(VECTOR, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def multiply_add(builder: Any) -> Any:
    """The function a * b + c of vectors, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")


def multiply_add_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums + a * b of vectors of 16 pairs of bfloat16, both products of a pair; for processors with AVX512-BF16.

    The instruction takes denormal numbers for 0, and rounds to nearest whatever the thread has set.
    """
    kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def pinned(builder: Any, vector: Any) -> Any:
    """`vector`, computed before anything that follows is read from memory; for AVX-512 alone.

    LLVM reads ahead of what it has registers for, and then moves sums out of theirs and back; the processor reads ahead
    by itself.
    """
    kind = ir.FunctionType(vector.type, [vector.type])
    return builder.asm(kind, "", "=v,0,~{memory}", [vector], True)


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """A vector of the lanes of two: 0 to 15 are those of `a`, 16 to 31 those of `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))


def columns_of(builder: Any, rows: list[Any]) -> list[Any]:
    """The transpose of 16 vectors by 64 shuffles, each one instruction that needs no table of lanes in a register."""
    quarters = range(0, LANES, 4)
    pairs = [[quarter + lane for quarter in quarters for lane in (i, LANES + i, i + 1, LANES + i + 1)] for i in (0, 2)]
    halves = [[quarter + lane for quarter in quarters for lane in (i, i + 1, LANES + i, LANES + i + 1)] for i in (0, 2)]
    parts = [
        [half + quarter + lane for half in (0, LANES) for quarter in (i, i + 8) for lane in range(4)] for i in (0, 4)
    ]
    quads = []  # quads[r][i]: elements i, i + 4, i + 8 and i + 12 of rows 4r to 4r + 3
    for r in range(0, LANES, 4):
        ab, cd = ([shuffled(builder, rows[r + i], rows[r + i + 1], pair) for pair in pairs] for i in (0, 2))
        quads.append([shuffled(builder, ab[i], cd[i], half) for i in (0, 1) for half in halves])
    columns: list[Any] = [None] * LANES
    for i in range(4):
        for odd, part in enumerate(parts):
            upper, lower = (shuffled(builder, quads[r][i], quads[r + 1][i], part) for r in (0, 2))
            for high, other in enumerate(parts):
                columns[i + 4 * odd + 8 * high] = shuffled(builder, upper, lower, other)
    return columns
