"""The inner loops of paged attention over a few rows, as LLVM vector code: keys and values go from the cache straight
into registers.

    add_scores     scores[rows, keys] = q[rows, width] . K[keys, width]^T
    add_values     acc[rows, width]  += p[rows, keys] . V[keys, width]

Sixteen keys by sixteen elements are loaded, transposed by 64 shuffles and multiplied at once: nothing is written in
between. Sums of scores stay in registers over a whole run of 16 keys, those of values over a whole tile. Both sum in
order, over the head's elements and over keys, one fused multiply-add after the other, as `matmul_add` does: the bits
are the same whichever computes them.

Blocks lie anywhere, so the processor does not see the next one coming. While a run is worked on the lines of the one
after the next are prefetched, 16 before each block of keys and those of one key with each key of values. More at once
are in vain: prefetches that find the queue of the first cache level full are dropped.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils

from kernels.cpu.attention.attention_tiles import RUN
from kernels.cpu.attention.cache_reads import END, KEY
from kernels.cpu.vectors.processor import HAS_WIDE_REGISTERS
from kernels.cpu.vectors.vector_code import (
    F32,
    F32X16,
    LANES,
    at,
    constant,
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

_AHEAD = 2  # so many runs behind the one that is worked on are prefetched
_FLAT, _RUNS = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")


def _add_scores(num_rows: int, num_runs: int) -> Any:
    """Compiles the product of rows and runs of 16 keys, whose sums stay in registers from the first element on.

    Runs take turns, as a run's sums wait for each other: a multiply-add for each element of the head, one after the
    other. Three rows by 64 keys of 64 elements take 183 ns in place of 314 by one run at a time. Sums are `pinned` at
    the end of a turn, or LLVM mixes the runs and has registers for neither.
    """

    @intrinsic
    def add_scores(
        typing_context: Any,
        q: Any,
        q_offset: Any,
        width: Any,
        keys: Any,
        runs: Any,
        run: Any,
        count: Any,
        scores: Any,
        scores_offset: Any,
        scores_stride: Any,
        after: Any,
        runs_after: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            width, index = arguments[2], arguments[2].type
            q_start, scores_start = (element(context, builder, signature, arguments, i) for i in (0, 7))
            here, ahead = (_starts(context, builder, signature, arguments, i) for i in ((3, 4), (10, 11)))
            numbers = [builder.add(arguments[5], index(i)) for i in range(num_runs)]
            firsts = [_start(builder, here, number) for number in numbers]
            aheads = [_start_ahead(builder, here, ahead, number, arguments[6]) for number in numbers]
            sums = [[cgutils.alloca_once(builder, F32X16) for _ in range(num_rows)] for _ in range(num_runs)]
            for of_run in sums:
                for total in of_run:
                    builder.store(constant(F32X16, 0.0), total)
            with cgutils.for_range_slice(builder, index(0), width, index(LANES)) as (d, _):
                rows = [at(builder, q_start, builder.add(d, builder.mul(width, index(r)))) for r in range(num_rows)]
                for first, ahead, of_run in zip(firsts, aheads, sums, strict=True):
                    _prefetch(builder, at(builder, ahead, builder.mul(d, index(RUN))), RUN * LANES, after.dtype)
                    lines = [at(builder, first, builder.add(d, builder.mul(width, index(key)))) for key in range(RUN)]
                    columns = transpose(builder, [load_elements(builder, line, keys.dtype) for line in lines])
                    for i, column in enumerate(columns):
                        for row, total in zip(rows, of_run, strict=True):
                            number = splat_at(builder, at(builder, row, index(i)), F32)
                            builder.store(fma(builder, number, column, builder.load(total)), total)
                    for total in of_run if HAS_WIDE_REGISTERS else ():
                        builder.store(pinned(builder, builder.load(total)), total)
            for run, of_run in enumerate(sums):
                for r, total in enumerate(of_run):
                    place = builder.add(builder.mul(arguments[9], index(r)), index(run * RUN))
                    store(builder, builder.load(total), at(builder, scores_start, place))
            return context.get_dummy_value()

        number = types.intp
        return types.void(
            _FLAT, number, number, keys, _RUNS, number, number, _FLAT, number, number, after, _RUNS
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
        after: Any,
        runs_after: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights_stride, (stride, column, num_keys) = arguments[1], arguments[4:7]
            index = stride.type
            weights_start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            here, ahead = (_starts(context, builder, signature, arguments, i) for i in ((2, 3), (9, 10)))
            num_runs = builder.udiv(builder.add(num_keys, index(RUN - 1)), index(RUN))
            acc_start = element(context, builder, signature, arguments, 7)
            acc_rows = [at(builder, acc_start, builder.mul(stride, index(r))) for r in range(num_rows)]
            totals = [[at(builder, row, index(v * LANES)) for v in range(vectors)] for row in acc_rows]
            sums = [[cgutils.alloca_once(builder, F32X16) for _ in range(vectors)] for _ in range(num_rows)]
            for r in range(num_rows):
                for v in range(vectors):
                    builder.store(load(builder, totals[r][v], F32X16), sums[r][v])
            with cgutils.for_range_slice(builder, index(0), num_keys, index(RUN)) as (first, _):
                left = builder.sub(num_keys, first)
                count = builder.select(builder.icmp_signed("<", left, index(RUN)), left, index(RUN))
                run = builder.udiv(first, index(RUN))
                start = at(builder, _start(builder, here, run), column)
                soon = at(builder, _start_ahead(builder, here, ahead, run, num_runs), column)
                with cgutils.for_range(builder, count) as loop:
                    distance = builder.mul(stride, loop.index)
                    _prefetch(builder, at(builder, soon, distance), vectors * LANES, values.dtype)
                    line = at(builder, start, distance)
                    parts = [at(builder, line, index(v * LANES)) for v in range(vectors)]
                    vectors_of_line = [load_elements(builder, part, values.dtype) for part in parts]
                    for r in range(num_rows):
                        key = builder.add(first, loop.index)
                        place = at(builder, weights_start, builder.add(builder.mul(weights_stride, index(r)), key))
                        weight = splat_at(builder, place, F32)
                        for v in range(vectors):
                            total = fma(builder, weight, vectors_of_line[v], builder.load(sums[r][v]))
                            builder.store(total, sums[r][v])
            for r in range(num_rows):
                for v in range(vectors):
                    store(builder, builder.load(sums[r][v]), totals[r][v])
            return context.get_dummy_value()

        number = types.intp
        return types.void(_FLAT, number, values, _RUNS, number, number, number, _FLAT, number, values, _RUNS), generate

    return add_values


def _starts(context: Any, builder: Any, signature: Any, arguments: Any, places: tuple[int, int]) -> tuple[Any, Any]:
    """Where a cache begins, and the places of runs in it: arguments with these numbers."""
    cache, runs = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in places)
    return cache, runs


def _start(builder: Any, starts: tuple[Any, Any], run: Any) -> Any:
    cache, runs = starts
    return at(builder, cache, builder.load(at(builder, runs, run)))


def _start_ahead(builder: Any, here: tuple[Any, Any], after: tuple[Any, Any], run: Any, count: Any) -> Any:
    """Where the run begins that is `_AHEAD` behind this one, `count` of which are read `here`."""
    number = builder.add(run, run.type(_AHEAD))
    is_here = builder.icmp_signed("<", number, count)
    number = builder.select(is_here, number, builder.sub(number, count))
    cache, runs = (builder.select(is_here, *pair) for pair in zip(here, after, strict=True))
    return _start(builder, (cache, runs), number)


def _prefetch(builder: Any, start: Any, count: int, kind: Any) -> None:
    """Prefetch elements of a numba type."""
    prefetch_bytes(builder, start, count * kind.bitwidth // 8, level=1)


_scores_1x1, _scores_2x1, _scores_3x1, _scores_4x1 = (_add_scores(rows, 1) for rows in (1, 2, 3, 4))
_scores_1x2, _scores_2x2, _scores_3x2, _scores_4x2 = (_add_scores(rows, 2) for rows in (1, 2, 3, 4))
_values_1x1, _values_2x1, _values_3x1, _values_4x1 = (_add_values(rows, 1) for rows in (1, 2, 3, 4))
_values_1x2, _values_2x2, _values_3x2, _values_4x2 = (_add_values(rows, 2) for rows in (1, 2, 3, 4))
_values_1x4, _values_2x4, _values_3x4, _values_4x4 = (_add_values(rows, 4) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def add_scores(rows, q, q_offset, width, keys, runs, scores, stride, after, runs_after):  # type: ignore[no-untyped-def]
    """scores[rows, :] = q[rows, width] . keys[:, width]^T for up to 4 rows and the keys of `runs`, up to 64.

    What is read next are `runs_after` of `after`; both runs as in `cache_reads`.
    """
    count = (runs[END] - runs[KEY] + RUN - 1) // RUN
    run, pairs = 0, count // 2 * 2 if HAS_WIDE_REGISTERS else 0
    while run < pairs:
        place = q, q_offset, width, keys, runs, run, count, scores, run * RUN, stride, after, runs_after
        if rows == 4:
            _scores_4x2(*place)
        elif rows == 3:
            _scores_3x2(*place)
        elif rows == 2:
            _scores_2x2(*place)
        else:
            _scores_1x2(*place)
        run += 2
    while run < count:
        place = q, q_offset, width, keys, runs, run, count, scores, run * RUN, stride, after, runs_after
        if rows == 4:
            _scores_4x1(*place)
        elif rows == 3:
            _scores_3x1(*place)
        elif rows == 2:
            _scores_2x1(*place)
        else:
            _scores_1x1(*place)
        run += 1


@njit(nogil=True)
def add_values(  # type: ignore[no-untyped-def]
    rows, p, p_stride, values, runs, width, column, end, num_keys, acc, offset, after, runs_after
):
    """acc[rows, column : end] += p[rows, num_keys] . values[:, column : end] for up to 4 rows of `width` numbers; run i
    of 16 keys begins at element runs[i].

    What is read next are `runs_after` of `after`; both runs as in `cache_reads`.
    """
    while column < end:
        place = offset + column
        if end - column >= 4 * LANES:
            if rows == 4:
                _values_4x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 3:
                _values_3x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 2:
                _values_2x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            else:
                _values_1x4(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            column += 4 * LANES
        elif end - column >= 2 * LANES:
            if rows == 4:
                _values_4x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 3:
                _values_3x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 2:
                _values_2x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            else:
                _values_1x2(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            column += 2 * LANES
        else:
            if rows == 4:
                _values_4x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 3:
                _values_3x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            elif rows == 2:
                _values_2x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            else:
                _values_1x1(p, p_stride, values, runs, width, column, num_keys, acc, place, after, runs_after)
            column += LANES
