"""The inner loops of paged attention over a few rows, as LLVM vector code: keys and values go from the cache straight
into registers.

    add_scores     scores[rows, keys] = q[rows, width] . K[keys, width]^T
    add_values     acc[rows, width]  += p[rows, keys] . V[keys, width]

Sixteen keys by sixteen elements are loaded, transposed by 64 shuffles and multiplied at once: nothing is written in
between. Sums of scores stay in registers over a whole run of 16 keys, those of values over a whole tile. Both sum in
order, over the head's elements and over keys, one fused multiply-add after the other, as `matmul_add` does: the bits
are the same whichever computes them.

Blocks lie anywhere, so the processor does not see the next one coming. While a run is worked on the lines of the next
one are asked for, 16 before each block of keys and those of one key with each key of values. More at once are in vain:
prefetches that find the queue of the first cache level full are dropped.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
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
    prefetch_bytes,
    splat,
    store,
)

_FLAT, _PLACES = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")


def _add_scores(num_rows: int) -> Any:
    """Compiles the product of rows and a run of 16 keys, whose sums stay in registers from the first element on."""

    @intrinsic
    def add_scores(
        typing_context: Any,
        q: Any,
        q_offset: Any,
        width: Any,
        keys: Any,
        start: Any,
        scores: Any,
        scores_offset: Any,
        scores_stride: Any,
        after: Any,
        after_start: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            width, index, fma = arguments[2], arguments[2].type, multiply_add(builder)
            q_start, first, scores_start, ahead = (
                element(context, builder, signature, arguments, i) for i in (0, 3, 5, 8)
            )
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(num_rows)]
            for total in sums:
                builder.store(ir.Constant(VECTOR, [0.0] * LANES), total)
            with cgutils.for_range_slice(builder, index(0), width, index(LANES)) as (d, _):
                _ask_for(builder, at(builder, ahead, builder.mul(d, index(RUN))), RUN * LANES, after.dtype)
                lines = [at(builder, first, builder.add(d, builder.mul(width, index(key)))) for key in range(RUN)]
                columns = columns_of(builder, [load_wide(builder, line, keys.dtype) for line in lines])
                rows = [at(builder, q_start, builder.add(d, builder.mul(width, index(r)))) for r in range(num_rows)]
                for i, column in enumerate(columns):
                    for row, total in zip(rows, sums, strict=True):
                        number = splat(builder, builder.load(at(builder, row, index(i))))
                        builder.store(builder.call(fma, [number, column, builder.load(total)]), total)
            for r, total in enumerate(sums):
                store(builder, builder.load(total), at(builder, scores_start, builder.mul(arguments[7], index(r))))
            return context.get_dummy_value()

        number = types.intp
        return types.void(_FLAT, number, number, keys, number, _FLAT, number, number, after, number), generate

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
        after: Any,
        after_start: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights_stride, (stride, column, num_keys) = arguments[1], arguments[4:7]
            index, fma = stride.type, multiply_add(builder)
            weights_start, cache, starts = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2, 3)
            )
            acc_start, after_start = (element(context, builder, signature, arguments, i) for i in (7, 9))
            acc_rows = [at(builder, acc_start, builder.mul(stride, index(r))) for r in range(num_rows)]
            totals = [[at(builder, row, index(v * LANES)) for v in range(vectors)] for row in acc_rows]
            sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(num_rows)]
            for r in range(num_rows):
                for v in range(vectors):
                    builder.store(load(builder, totals[r][v]), sums[r][v])
            with cgutils.for_range_slice(builder, index(0), num_keys, index(RUN)) as (first, _):
                left = builder.sub(num_keys, first)
                count = builder.select(builder.icmp_signed("<", left, index(RUN)), left, index(RUN))
                run = at(builder, starts, builder.udiv(first, index(RUN)))
                start, next_start = (
                    at(builder, cache, builder.add(builder.load(at(builder, run, index(i))), column)) for i in (0, 1)
                )
                is_last = builder.icmp_signed("<=", left, index(RUN))
                ahead = builder.select(is_last, at(builder, after_start, column), next_start)
                with cgutils.for_range(builder, count) as loop:
                    distance = builder.mul(stride, loop.index)
                    _ask_for(builder, at(builder, ahead, distance), vectors * LANES, values.dtype)
                    line = at(builder, start, distance)
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
        return types.void(
            _FLAT, number, values, _PLACES, number, number, number, _FLAT, number, values, number
        ), generate

    return add_values


def _ask_for(builder: Any, start: Any, count: int, kind: Any) -> None:
    """Prefetch elements of a numba type."""
    prefetch_bytes(builder, start, count * kind.bitwidth // 8, level=1)


_scores_1, _scores_2, _scores_3, _scores_4 = (_add_scores(rows) for rows in (1, 2, 3, 4))
_values_1x1, _values_2x1, _values_3x1, _values_4x1 = (_add_values(rows, 1) for rows in (1, 2, 3, 4))
_values_1x2, _values_2x2, _values_3x2, _values_4x2 = (_add_values(rows, 2) for rows in (1, 2, 3, 4))
_values_1x4, _values_2x4, _values_3x4, _values_4x4 = (_add_values(rows, 4) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def add_scores(rows, q, q_offset, width, keys, runs, scores, stride, after, after_start):  # type: ignore[no-untyped-def]
    """scores[rows, :] = q[rows, width] . keys[:, width]^T for up to 4 rows and the keys of a cursor's `runs`, up to 64.

    What is read next begins at element `after_start` of `after`.
    """
    num_runs = (runs[END] - runs[KEY] + RUN - 1) // RUN
    for run in range(num_runs):
        start, place, ahead, begin = runs[run], run * RUN, after, after_start
        if run + 1 < num_runs:
            ahead, begin = keys, runs[run + 1]
        if rows == 4:
            _scores_4(q, q_offset, width, keys, start, scores, place, stride, ahead, begin)
        elif rows == 3:
            _scores_3(q, q_offset, width, keys, start, scores, place, stride, ahead, begin)
        elif rows == 2:
            _scores_2(q, q_offset, width, keys, start, scores, place, stride, ahead, begin)
        else:
            _scores_1(q, q_offset, width, keys, start, scores, place, stride, ahead, begin)


@njit(nogil=True)
def add_values(  # type: ignore[no-untyped-def]
    rows, p, p_stride, values, runs, width, column, end, num_keys, acc, offset, after, after_start
):
    """acc[rows, column : end] += p[rows, num_keys] . values[:, column : end] for up to 4 rows of `width` numbers; run i
    of 16 keys begins at element runs[i].

    What is read next begins at element `after_start` of `after`.
    """
    while column < end:
        place = offset + column
        if end - column >= 4 * LANES:
            if rows == 4:
                _values_4x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 3:
                _values_3x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 2:
                _values_2x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            else:
                _values_1x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            column += 4 * LANES
        elif end - column >= 2 * LANES:
            if rows == 4:
                _values_4x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 3:
                _values_3x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 2:
                _values_2x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            else:
                _values_1x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            column += 2 * LANES
        else:
            if rows == 4:
                _values_4x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 3:
                _values_3x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            elif rows == 2:
                _values_2x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            else:
                _values_1x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, after_start)
            column += LANES
