"""The inner loops of paged attention over a few rows, as LLVM vector code: keys and values go from the cache straight
into registers.

    add_scores     scores[rows, 16 keys] += q[rows, 16 elements] . K[16 keys, 16 elements]^T
    add_values     acc[rows, columns]    += p[rows, keys] . V[keys, columns]

Sixteen keys by sixteen elements are loaded, transposed by 64 shuffles and multiplied at once: written out in between,
64 keys of 64 elements and 3 rows take 258 ns on a Zen 5 core, and 177 so. Sums of values stay in registers over a whole
tile. Both sum in order, over the head's elements and over keys, one fused multiply-add after the other, as `matmul_add`
does: the bits are the same whichever computes them.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils

from kernels.cpu.attention_tiles import RUN
from kernels.cpu.cache_reads import END, KEY
from kernels.cpu.numbers import intrinsic
from kernels.cpu.vector_code import (
    LANES,
    VECTOR,
    at,
    columns_of,
    element,
    load,
    load_wide,
    multiply_add,
    splat,
    store,
)

_FLAT, _PLACES = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")


def _add_scores(num_rows: int) -> Any:
    """Compiles the product of rows and 16 x 16 numbers of keys."""

    @intrinsic
    def add_scores(
        typing_context: Any,
        q: Any,
        q_offset: Any,
        q_stride: Any,
        keys: Any,
        start: Any,
        stride: Any,
        scores: Any,
        scores_offset: Any,
        scores_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            index, fma = arguments[1].type, multiply_add(builder)
            q_start, first, scores_start = (element(context, builder, signature, arguments, i) for i in (0, 3, 6))
            lines = [at(builder, first, builder.mul(arguments[5], index(key))) for key in range(LANES)]
            columns = columns_of(builder, [load_wide(builder, line, keys.dtype) for line in lines])
            rows = [at(builder, q_start, builder.mul(arguments[2], index(r))) for r in range(num_rows)]
            places = [at(builder, scores_start, builder.mul(arguments[8], index(r))) for r in range(num_rows)]
            sums = [load(builder, place) for place in places]
            for d, column in enumerate(columns):
                for r in range(num_rows):
                    number = splat(builder, builder.load(at(builder, rows[r], index(d))))
                    sums[r] = builder.call(fma, [number, column, sums[r]])
            for total, place in zip(sums, places, strict=True):
                store(builder, total, place)
            return context.get_dummy_value()

        return types.void(
            _FLAT, types.intp, types.intp, keys, types.intp, types.intp, _FLAT, types.intp, types.intp
        ), generate

    return add_scores


def _add_values(num_rows: int, vectors: int) -> Any:
    """Compiles the product of weights and the values of a tile, whose sums stay in registers from run to run."""

    @intrinsic
    def add_values(
        typing_context: Any,
        weights: Any,
        weights_stride: Any,
        values: Any,
        runs: Any,
        stride: Any,
        column: Any,
        num_keys: Any,
        acc: Any,
        acc_offset: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights_stride, (stride, column, num_keys) = arguments[1], arguments[4:7]
            index, fma = stride.type, multiply_add(builder)
            weights_start, cache, starts = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2, 3)
            )
            acc_start = element(context, builder, signature, arguments, 7)
            acc_rows = [at(builder, acc_start, builder.mul(stride, index(r))) for r in range(num_rows)]
            totals = [[at(builder, row, index(v * LANES)) for v in range(vectors)] for row in acc_rows]
            sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(num_rows)]
            for r in range(num_rows):
                for v in range(vectors):
                    builder.store(load(builder, totals[r][v]), sums[r][v])
            with cgutils.for_range_slice(builder, index(0), num_keys, index(RUN)) as (first, _):
                left = builder.sub(num_keys, first)
                count = builder.select(builder.icmp_signed("<", left, index(RUN)), left, index(RUN))
                run_start = builder.load(at(builder, starts, builder.udiv(first, index(RUN))))
                start = at(builder, cache, builder.add(run_start, column))
                with cgutils.for_range(builder, count) as loop:
                    line = at(builder, start, builder.mul(stride, loop.index))
                    vectors_of_line = [
                        load_wide(builder, at(builder, line, index(v * LANES)), values.dtype) for v in range(vectors)
                    ]
                    for r in range(num_rows):
                        key = builder.add(first, loop.index)
                        place = at(builder, weights_start, builder.add(builder.mul(weights_stride, index(r)), key))
                        weight = splat(builder, builder.load(place))
                        for v in range(vectors):
                            total = builder.call(fma, [weight, vectors_of_line[v], builder.load(sums[r][v])])
                            builder.store(total, sums[r][v])
            for r in range(num_rows):
                for v in range(vectors):
                    store(builder, builder.load(sums[r][v]), totals[r][v])
            return context.get_dummy_value()

        number = types.intp
        return types.void(_FLAT, number, values, _PLACES, number, number, number, _FLAT, number), generate

    return add_values


_scores_1, _scores_2, _scores_3, _scores_4 = (_add_scores(rows) for rows in (1, 2, 3, 4))
_values_1x1, _values_2x1, _values_3x1, _values_4x1 = (_add_values(rows, 1) for rows in (1, 2, 3, 4))
_values_1x4, _values_2x4, _values_3x4, _values_4x4 = (_add_values(rows, 4) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def add_scores(rows, q, q_offset, q_stride, keys, runs, d, scores, scores_stride):  # type: ignore[no-untyped-def]
    """scores[rows, 64] += q[rows, 16] . keys[64, d : d + 16]^T for up to 4 rows of a cursor's `runs`.

    Sums of a run wait for each other, and its neighbours are transposed meanwhile: hence all runs before the next `d`.
    """
    for run in range((runs[END] - runs[KEY] + RUN - 1) // RUN):
        start, place = runs[run] + d, run * RUN
        if rows == 4:
            _scores_4(q, q_offset, q_stride, keys, start, q_stride, scores, place, scores_stride)
        elif rows == 3:
            _scores_3(q, q_offset, q_stride, keys, start, q_stride, scores, place, scores_stride)
        elif rows == 2:
            _scores_2(q, q_offset, q_stride, keys, start, q_stride, scores, place, scores_stride)
        else:
            _scores_1(q, q_offset, q_stride, keys, start, q_stride, scores, place, scores_stride)


@njit(nogil=True)
def add_values(rows, p, p_stride, values, runs, width, num_keys, acc, offset):  # type: ignore[no-untyped-def]
    """acc[rows, width] += p[rows, num_keys] . values for up to 4 rows; run i of 16 keys begins at element runs[i]."""
    column = 0
    while column < width:
        place = offset + column
        if width - column >= 4 * LANES:
            if rows == 4:
                _values_4x4(p, p_stride, values, runs, width, column, num_keys, acc, place)
            elif rows == 3:
                _values_3x4(p, p_stride, values, runs, width, column, num_keys, acc, place)
            elif rows == 2:
                _values_2x4(p, p_stride, values, runs, width, column, num_keys, acc, place)
            else:
                _values_1x4(p, p_stride, values, runs, width, column, num_keys, acc, place)
            column += 4 * LANES
        else:
            if rows == 4:
                _values_4x1(p, p_stride, values, runs, width, column, num_keys, acc, place)
            elif rows == 3:
                _values_3x1(p, p_stride, values, runs, width, column, num_keys, acc, place)
            elif rows == 2:
                _values_2x1(p, p_stride, values, runs, width, column, num_keys, acc, place)
            else:
                _values_1x1(p, p_stride, values, runs, width, column, num_keys, acc, place)
            column += LANES
