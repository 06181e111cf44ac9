"""Products and transposes of float32 tiles that stay in registers: intrinsics made of `vector_code`, for compiled code.

Why not plain loops: LLVM keeps no block of accumulators in registers across an outer loop, which makes the product of
4 rows by 64 columns five times slower than here (128 ns at depth 64 on a Zen 5 core, of 125 possible). Every sum runs
over `depth` in order, one fused multiply-add after the other, however many rows are computed at once.

What is multiplied by or transposed may be of half precision (see `numbers`) and becomes float32 on its way into a
register. Where B is of pairs of bfloat16 (uint32), so is A, whose float32 are 32 bits and nothing else, and an element
of depth is two inputs (`packed_weight.pack_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core import cgutils

from kernels.cpu.vectors.cache_prefetch import WHOLE
from kernels.cpu.vectors.dot_products import dot_pairs
from kernels.cpu.vectors.processor import HAS_WIDE_REGISTERS
from kernels.cpu.vectors.vector_code import (
    CACHE_LINE_BYTES,
    F32,
    F32X16,
    I8,
    LANES,
    at,
    element,
    fma,
    intrinsic,
    load,
    load_elements,
    pinned,
    prefetch_bytes,
    splat_at,
    store,
    transpose,
)

STREAMED_VECTORS = 3  # columns of a panel that is streamed, in vectors: 8 x 3 accumulators, 3 of B, of 32 registers
PANEL = STREAMED_VECTORS * LANES
STREAMED_ROWS = 8 if HAS_WIDE_REGISTERS else 2


def compile_multiply_add(rows: int, vectors: int, *, is_streamed: bool = False) -> Any:
    """Compiles C = S + A[rows, depth] . B[depth, 16 vectors] with C in registers; sums run over depth.

    The function takes each matrix as (flat array, offset, row stride), S before C, then depth, then `ahead`. S may be
    C, or one line whose row stride is 0. Where B is streamed out of memory, the elements that lie so far behind each
    row of it are prefetched meanwhile.
    """

    @intrinsic
    def add_product(
        typing_context: Any,
        a: Any,
        a_offset: Any,
        a_stride: Any,
        b: Any,
        b_offset: Any,
        b_stride: Any,
        s: Any,
        s_offset: Any,
        s_stride: Any,
        c: Any,
        c_offset: Any,
        c_stride: Any,
        depth: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            count, distance = arguments[12:]

            def prefetch(number: Any, b_line: Any) -> None:
                if is_streamed:
                    line_bytes = vectors * LANES * b.dtype.bitwidth // 8
                    prefetch_bytes(builder, at(builder, b_line, distance), line_bytes)

            _sum_products(context, builder, signature, arguments, rows, vectors, count, prefetch)
            return context.get_dummy_value()

        number = types.intp
        return types.void(*_matrices(b), number, number), generate

    return add_product


def compile_multiply_add_and_prefetch(rows: int, vectors: int) -> Any:
    """As `compile_multiply_add`, but what is prefetched are lines of `cache_prefetch.next_lines`."""

    @intrinsic
    def add_product(
        typing_context: Any,
        a: Any,
        a_offset: Any,
        a_stride: Any,
        b: Any,
        b_offset: Any,
        b_stride: Any,
        s: Any,
        s_offset: Any,
        s_stride: Any,
        c: Any,
        c_offset: Any,
        c_stride: Any,
        depth: Any,
        places: Any,
        shift: Any,
        rate: Any,
        first: Any,
        num_lines: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            count = arguments[12]
            lines = PrefetchedLines(builder, *arguments[13:])

            def prefetch(number: Any, b_line: Any) -> None:
                lines.prefetch_lines(number)

            is_full = HAS_WIDE_REGISTERS and rows > 6
            _sum_products(context, builder, signature, arguments, rows, vectors, count, prefetch, is_full=is_full)
            return context.get_dummy_value()

        number = types.intp
        return types.void(*_matrices(b), *[number] * 6), generate

    return add_product


class PrefetchedLines:
    """Appends prefetches of the lines of `cache_prefetch.next_lines`, of which there is at least one."""

    def __init__(self, builder: Any, places: Any, shift: Any, rate: Any, first: Any, count: Any) -> None:
        one = count.type(1)
        self._builder, self._places, self._shift, self._rate, self._first = builder, places, shift, rate, first
        self._last = builder.sub(builder.add(first, count), one)
        self._within = builder.sub(builder.shl(one, shift), one)

    def prefetch_lines(self, number: Any) -> None:
        """The one of the input with this number. Behind the last it is the last once more, which costs less than to ask
        whether there is another."""
        builder, index = self._builder, number.type
        line = builder.add(self._first, builder.udiv(builder.mul(number, self._rate), index(WHOLE)))
        line = builder.select(builder.icmp_signed("<", line, self._last), line, self._last)
        place = builder.add(self._places, builder.mul(builder.lshr(line, self._shift), index(8)))
        start = load(builder, place, index)
        offset = builder.mul(builder.and_(line, self._within), index(CACHE_LINE_BYTES))
        prefetch_bytes(builder, at(builder, start, offset), CACHE_LINE_BYTES)


def _matrices(b: Any) -> tuple[Any, ...]:
    """The types of A, B, S and C, each as (flat array, offset, row stride)."""
    flat, number = types.Array(types.float32, 1, "C"), types.intp
    return tuple(part for matrix in (flat, b, flat, flat) for part in (matrix, number, number))


def _sum_products(
    context: Any,
    builder: Any,
    signature: Any,
    arguments: Any,
    rows: int,
    vectors: int,
    depth: Any,
    prefetch: Callable[[Any, Any], None],
    *,
    is_full: bool = False,
) -> None:
    """Appends the loop over inputs; `prefetch` appends the prefetches of an input, given its number and line of B.

    Where it leaves registers too `is_full` of sums, these are `pinned`: LLVM kept some in memory, and the loop took
    2.4 times as long.
    """
    a_start, a_row, b_start, b_row, s_start, s_row, c_start, c_row = (
        element(context, builder, signature, arguments, i) if i % 3 == 0 else arguments[i + 1]
        for i in (0, 1, 3, 4, 6, 7, 9, 10)
    )
    kind, index = signature.args[3].dtype, depth.type
    sums = [[cgutils.alloca_once(builder, F32X16) for _ in range(vectors)] for _ in range(rows)]
    sources, places = (
        [
            [at(builder, start, builder.add(builder.mul(row, index(r)), index(v * LANES))) for v in range(vectors)]
            for r in range(rows)
        ]
        for start, row in ((s_start, s_row), (c_start, c_row))
    )
    for r in range(rows):
        for v in range(vectors):
            builder.store(load(builder, sources[r][v], F32X16), sums[r][v])
    with cgutils.for_range(builder, depth) as loop:
        b_line = at(builder, b_start, builder.mul(b_row, loop.index))
        b_values = [load_elements(builder, at(builder, b_line, index(v * LANES)), kind) for v in range(vectors)]
        prefetch(loop.index, b_line)
        for r in range(rows):
            a_place = at(builder, a_start, builder.add(builder.mul(a_row, index(r)), loop.index))
            a_value = splat_at(builder, a_place, F32)
            for v in range(vectors):
                before = builder.load(sums[r][v])
                if kind == types.uint32:
                    total = dot_pairs(builder, a_value, b_values[v], before)
                else:
                    total = fma(builder, a_value, b_values[v], before)
                builder.store(pinned(builder, total) if is_full else total, sums[r][v])
    for r in range(rows):
        for v in range(vectors):
            store(builder, builder.load(sums[r][v]), places[r][v])


@intrinsic
def transpose_tile(
    typing_context: Any, a: Any, a_offset: Any, a_stride: Any, b: Any, b_offset: Any, b_stride: Any
) -> Any:
    """b[16, 16] = a[16, 16]^T in registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_start = element(context, builder, signature, arguments, 0)
        b_start = element(context, builder, signature, arguments, 3)
        index = arguments[1].type
        lines = [at(builder, a_start, builder.mul(arguments[2], index(r))) for r in range(LANES)]
        columns = transpose(builder, [load_elements(builder, line, a.dtype) for line in lines])
        for r in range(LANES):
            store(builder, columns[r], at(builder, b_start, builder.mul(arguments[5], index(r))))
        return context.get_dummy_value()

    flat, number = types.Array(types.float32, 1, "C"), types.intp
    return types.void(a, number, number, flat, number, number), generate


@intrinsic
def prefetch_line(typing_context: Any, line: Any) -> Any:
    """Prefetch a line of elements, a contiguous array, into the second cache level."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        start, index = builder.bitcast(array.data, I8.as_pointer()), array.nitems.type
        num_bytes = builder.mul(array.nitems, array.itemsize)
        line_bytes = index(CACHE_LINE_BYTES)
        with cgutils.for_range_slice(builder, index(0), num_bytes, line_bytes) as (offset, _):
            prefetch_bytes(builder, at(builder, start, offset), CACHE_LINE_BYTES)
        return context.get_dummy_value()

    return types.void(line), generate


_add_1x1, _add_2x1, _add_3x1, _add_4x1 = (compile_multiply_add(rows, 1) for rows in (1, 2, 3, 4))
_add_1x2, _add_2x2, _add_3x2, _add_4x2 = (compile_multiply_add(rows, 2) for rows in (1, 2, 3, 4))
_add_1x3, _add_2x3, _add_3x3, _add_4x3 = (compile_multiply_add(rows, 3) for rows in (1, 2, 3, 4))
_add_1x4, _add_2x4, _add_3x4, _add_4x4 = (compile_multiply_add(rows, 4) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def matmul_add(  # type: ignore[no-untyped-def]
    rows, a, a_offset, a_stride, b, b_offset, b_stride, s, s_offset, s_stride, c, c_offset, c_stride, depth, width
):
    """C[rows, width] = S + A[rows, depth] . B[depth, width] for up to 4 rows; width is a multiple of 16, S as in
    `compile_multiply_add`."""
    column = 0
    while column < width:
        factors, others = (a, a_offset, a_stride), (b, b_offset + column, b_stride)
        start, sums = (s, s_offset + column, s_stride), (c, c_offset + column, c_stride)
        vectors = min((width - column) // LANES, 4)
        if vectors == 4:
            if rows == 4:
                _add_4x4(*factors, *others, *start, *sums, depth, 0)
            elif rows == 3:
                _add_3x4(*factors, *others, *start, *sums, depth, 0)
            elif rows == 2:
                _add_2x4(*factors, *others, *start, *sums, depth, 0)
            else:
                _add_1x4(*factors, *others, *start, *sums, depth, 0)
        elif vectors == 3:
            if rows == 4:
                _add_4x3(*factors, *others, *start, *sums, depth, 0)
            elif rows == 3:
                _add_3x3(*factors, *others, *start, *sums, depth, 0)
            elif rows == 2:
                _add_2x3(*factors, *others, *start, *sums, depth, 0)
            else:
                _add_1x3(*factors, *others, *start, *sums, depth, 0)
        elif vectors == 2:
            if rows == 4:
                _add_4x2(*factors, *others, *start, *sums, depth, 0)
            elif rows == 3:
                _add_3x2(*factors, *others, *start, *sums, depth, 0)
            elif rows == 2:
                _add_2x2(*factors, *others, *start, *sums, depth, 0)
            else:
                _add_1x2(*factors, *others, *start, *sums, depth, 0)
        else:
            if rows == 4:
                _add_4x1(*factors, *others, *start, *sums, depth, 0)
            elif rows == 3:
                _add_3x1(*factors, *others, *start, *sums, depth, 0)
            elif rows == 2:
                _add_2x1(*factors, *others, *start, *sums, depth, 0)
            else:
                _add_1x1(*factors, *others, *start, *sums, depth, 0)
        column += vectors * LANES
