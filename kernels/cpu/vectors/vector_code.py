"""Vectors in registers: the words that kernels are written in where a plain loop compiles to less.

A kernel is a numba intrinsic. Its `generate` runs once, when the kernel is compiled: each function below appends LLVM
instructions to `builder` and returns the value that they will compute. So a variable of Python stands for a register,
and a loop of Python is unrolled. For example out[i] += factor * x[i], float32 at two addresses, `count` a multiple of
16, called from compiled code as `add_scaled(out, x, factor, count)`:

    @intrinsic
    def add_scaled(typing_context, out, x, factor, count):
        def generate(context, builder, signature, arguments):
            out, x, factor, count = arguments
            factors = splat(builder, factor)
            with cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES)) as (first, _):
                offset = builder.mul(first, first.type(4))
                x_part = load(builder, at(builder, x, offset), F32X16)
                place = at(builder, out, offset)
                store(builder, fma(builder, factors, x_part, load(builder, place, F32X16)), place)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.float32, types.intp), generate

A vector has 16 lanes: one AVX-512 register of 32-bit numbers, which LLVM splits on narrower machines. Its kind is
`F32X16` or one of those beside it. A place in memory is an LLVM pointer, as `element` gives it for an array, or an
address, which is an integer, as launchers pass it on; nothing is assumed of its alignment. An element is a numba type
that says how a number is kept: float32, uint16 for bfloat16, int16 for float16 (see `numbers`).

    places       element  at
    memory       load  store  load_elements  store_elements  prefetch_bytes  prefetch_lines
    make         constant  splat  splat_at
    compute      fma  larger  call, for any other intrinsic of LLVM; builder.fadd, builder.mul, ...; `dot_products`
    convert      to_float32  from_float32  integers_to_float32  builder.bitcast
    shuffle      shuffle  transpose
    reduce       reduce  reduce_rows
    schedule     pinned
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

intrinsic: Any = extending.intrinsic  # its types are those of the implementation, not of the call

CACHE_LINE_BYTES = 64
LANES = 16

F32, I8, I16, I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
F32X16, I8X16, I16X16, I32X16 = (ir.VectorType(number, LANES) for number in (F32, I8, I16, I32))
_VECTORS_OF = {types.float32: F32X16, types.uint32: F32X16, types.uint16: I16X16, types.int16: I16X16}


def element(context: Any, builder: Any, signature: Any, arguments: Any, position: int) -> Any:
    """Pointer to element `arguments[position + 1]` of the array `arguments[position]`."""
    array = context.make_array(signature.args[position])(context, builder, arguments[position])
    return at(builder, array.data, arguments[position + 1])


def at(builder: Any, place: Any, distance: Any) -> Any:
    """The place that lies behind another: by so many elements of a pointer, by so many bytes of an address."""
    return builder.gep(place, [distance]) if _is_pointer(place) else builder.add(place, distance)


def load(builder: Any, place: Any, kind: Any) -> Any:
    """A number or a vector of this kind."""
    return builder.load(_pointer(builder, place, kind), align=1)


def store(builder: Any, value: Any, place: Any) -> None:
    """Write a number or a vector."""
    builder.store(value, _pointer(builder, place, value.type), align=1)


def load_elements(builder: Any, place: Any, element: Any) -> Any:
    """16 elements as f32[16]. Pairs of bfloat16, which are uint32, stay 32 bits each that no number is made of."""
    return to_float32(builder, load(builder, place, _VECTORS_OF[element]), element)


def store_elements(builder: Any, values: Any, place: Any, element: Any) -> None:
    """Write f32[16] as 16 elements; see `from_float32`."""
    store(builder, from_float32(builder, values, element), place)


def prefetch_bytes(builder: Any, place: Any, num_bytes: int, *, level: int = 2) -> None:
    """Bring the cache lines of so many bytes into the first or second cache level; they need not exist."""
    start = builder.bitcast(place, I8.as_pointer()) if _is_pointer(place) else place
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        distance = I32(offset) if _is_pointer(place) else place.type(offset)
        _prefetch(builder, at(builder, start, distance), level)


def prefetch_lines(builder: Any, address: Any, first_line: Any, num_lines: Any, *, level: int = 2) -> None:
    """Likewise, for a number of lines that is known at run time: from number `first_line` behind an address on."""
    with cgutils.for_range(builder, num_lines) as loop:
        offset = builder.mul(builder.add(first_line, loop.index), num_lines.type(CACHE_LINE_BYTES))
        _prefetch(builder, at(builder, address, offset), level)


def constant(kind: Any, number: float) -> Any:
    """The number in all lanes of a vector of this kind."""
    return ir.Constant(kind, [number] * kind.count)


def splat(builder: Any, number: Any) -> Any:
    """A number that is known at run time in all 16 lanes."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, I32(0)), nothing, constant(I32X16, 0))


def splat_at(builder: Any, place: Any, kind: Any) -> Any:
    """The number of this kind that lies at a place in all 16 lanes."""
    return splat(builder, load(builder, place, kind))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of f32[16], rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", F32X16, a, b, c)


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two float32 lane by lane; b where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """What an intrinsic of LLVM gives, of the kind `result`."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def to_float32(builder: Any, value: Any, element: Any) -> Any:
    """An element, or a vector of 16, as float32; a pair of bfloat16 (uint32) as it is."""
    if element in (types.float32, types.uint32):
        return value
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, _like(value, ir.HalfType())), _like(value, F32))
    words = builder.zext(value, _like(value, I32))
    return builder.bitcast(builder.shl(words, _number(words, 16)), _like(value, F32))


def from_float32(builder: Any, value: Any, element: Any) -> Any:
    """float32, one or 16, as elements: rounded to nearest, ties to even.

    bfloat16: the NaN that x86 makes stays one; of others the bits may become those of a number.
    """
    if element == types.float32:
        return value
    if element == types.int16:
        return builder.bitcast(builder.fptrunc(value, _like(value, ir.HalfType())), _like(value, I16))
    bits = builder.bitcast(value, _like(value, I32))
    odd = builder.and_(builder.lshr(bits, _number(bits, 16)), _number(bits, 1))
    rounded = builder.add(builder.add(bits, _number(bits, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _number(bits, 16)), _like(value, I16))


def integers_to_float32(builder: Any, integers: Any) -> Any:
    """i8[16] or i32[16] as f32[16]."""
    words = integers if integers.type == I32X16 else builder.sext(integers, I32X16)
    return builder.sitofp(words, F32X16)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """A vector of the lanes of two: 0 to 15 are those of `a`, 16 to 31 those of `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The transpose of 16 vectors by 64 shuffles, each one instruction that needs no table of lanes in a register."""
    quarters = range(0, LANES, 4)
    pairs = [[quarter + lane for quarter in quarters for lane in (i, LANES + i, i + 1, LANES + i + 1)] for i in (0, 2)]
    halves = [[quarter + lane for quarter in quarters for lane in (i, i + 1, LANES + i, LANES + i + 1)] for i in (0, 2)]
    parts = [
        [half + quarter + lane for half in (0, LANES) for quarter in (i, i + 8) for lane in range(4)] for i in (0, 4)
    ]
    quads = []  # quads[r][i]: elements i, i + 4, i + 8 and i + 12 of rows 4r to 4r + 3
    for r in range(0, LANES, 4):
        ab, cd = ([shuffle(builder, rows[r + i], rows[r + i + 1], pair) for pair in pairs] for i in (0, 2))
        quads.append([shuffle(builder, ab[i], cd[i], half) for i in (0, 1) for half in halves])
    columns: list[Any] = [None] * LANES
    for i in range(4):
        for odd, part in enumerate(parts):
            upper, lower = (shuffle(builder, quads[r][i], quads[r + 1][i], part) for r in (0, 2))
            for high, other in enumerate(parts):
                columns[i + 4 * odd + 8 * high] = shuffle(builder, upper, lower, other)
    return columns


def reduce(builder: Any, operation: str, integers: Any) -> Any:
    """One number of i32[16]: their sum by "add", the largest without a sign by "umax"."""
    return call(builder, f"llvm.vector.reduce.{operation}.v{LANES}i32", I32, integers)


def reduce_rows(builder: Any, rows: list[list[Any]], combine: Callable[[Any, Any, Any], Any]) -> list[Any]:
    """One float32 of each row's f32[16] vectors, a power of two of them.

    Two become one by `combine(builder, a, b)` again and again, first vectors, then lanes: one order on every machine.
    Rows take turns, as each waits for its last result.
    """
    while len(rows[0]) > 1:
        rows = [[combine(builder, a, b) for a, b in zip(row[::2], row[1::2], strict=True)] for row in rows]
    results, width = [vector for (vector,) in rows], LANES // 2
    while width:
        lanes = [lane ^ width for lane in range(LANES)]
        results = [combine(builder, vector, shuffle(builder, vector, vector, lanes)) for vector in results]
        width //= 2
    return [builder.extract_element(vector, I32(0)) for vector in results]


def pinned(builder: Any, vector: Any) -> Any:
    """`vector`, computed before anything that follows is read from memory; for AVX-512 alone.

    LLVM reads ahead of what it has registers for, and then moves sums out of theirs and back; the processor reads ahead
    by itself.
    """
    kind = ir.FunctionType(vector.type, [vector.type])
    return builder.asm(kind, "", "=v,0,~{memory}", [vector], True)


def _is_pointer(place: Any) -> bool:
    return isinstance(place.type, ir.PointerType)


def _pointer(builder: Any, place: Any, kind: Any) -> Any:
    make = builder.bitcast if _is_pointer(place) else builder.inttoptr
    return make(place, kind.as_pointer())


def _prefetch(builder: Any, place: Any, level: int) -> None:
    pointer = _pointer(builder, place, I8)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(4 - level), I32(1))


def _like(value: Any, number: Any) -> Any:
    """The kind of as many of these numbers as `value` has."""
    return ir.VectorType(number, value.type.count) if isinstance(value.type, ir.VectorType) else number


def _number(value: Any, number: int) -> Any:
    """A constant like `value`, in all of its lanes."""
    return constant(value.type, number) if isinstance(value.type, ir.VectorType) else value.type(number)
