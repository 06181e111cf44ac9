"""Products of quantised rows and weights of four bits that stay in registers, as LLVM vector code.

A tile is a few rows by the 48 outputs of a panel of `few_bits`. Over one group of 32 inputs its sums are exact
integers; then they become what the group adds to the result:

    total[r, o] += step[r, g] * (d[o, g] * sum_i w[o, i] q[r, i] + m[o, g] * sum_i q[r, i])        w = 0 .. 15

d and m are float16, and exact in float32; a format without minima has m = least * d. A total starts with the bias. A
word of 8 inputs of an output has those of even number in the lower halves of its four bytes and those of odd number in
the upper: one mask makes it the unsigned factors of one `vpdpbusd`, a shift and a mask those of the next, and a row's
bytes lie in that order, too (`int8_rows`).
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils

from kernels.cpu.products.few_bits import FORMATS, GROUP, STEP
from kernels.cpu.vectors.dot_products import dot_bytes
from kernels.cpu.vectors.float_tile import PANEL, STREAMED_VECTORS
from kernels.cpu.vectors.vector_code import (
    CACHE_LINE_BYTES,
    F32,
    F32X16,
    I32,
    I32X16,
    LANES,
    at,
    constant,
    fma,
    integers_to_float32,
    intrinsic,
    load,
    load_elements,
    prefetch_lines,
    splat,
    splat_at,
    store,
)
from kernels.int8_weight import QUAD

TILE_ROWS = 4
# One row by 49152 x 576 out of memory, two threads: 441 us, and 471 where the processor finds the next weights itself.
_AHEAD_BYTES = 4 << 10
_CHAINS = 6  # sums that have to be under way at once, or each waits for the last
_RECORD_LINES = max(few.record_bytes for few in FORMATS.values() if few.bits == 4) // CACHE_LINE_BYTES
_LOW_HALVES = 0x0F0F0F0F
_FLOAT16 = types.int16  # as an element, see `numbers`


def _tile(rows: int) -> Any:
    """Compiles the product of a tile. Memory is given by its address, and the bytes from one row or record to the next.

    `steps` (float32) and `sums` (int32, -128 times a group's sum of q) have one number a row and group. What lies at
    `minima` in a record are 48 float16 that `minimum_factor` makes minima over -128. With each group, `ahead_lines`
    cache lines from `ahead` on are prefetched, and `other_lines` from `other` on; tiles of fewer rows, which are alone
    with a panel or the last to read it, prefetch what lies shortly behind their record instead.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        kind: Any,
        q: Any,
        q_stride: Any,
        steps: Any,
        sums: Any,
        group_stride: Any,
        weight: Any,
        record_bytes: Any,
        minima: Any,
        minimum_factor: Any,
        bias: Any,
        out: Any,
        out_stride: Any,
        num_groups: Any,
        ahead: Any,
        ahead_lines: Any,
        other: Any,
        other_lines: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (
                q_start,
                q_stride,
                step_start,
                sum_start,
                group_stride,
                weight_start,
                record_bytes,
                minima,
                minimum_factor,
                bias_start,
                out_start,
                out_stride,
                count,
                ahead_start,
                ahead_lines,
                other_start,
                other_lines,
            ) = arguments[1:]
            index = count.type
            parts = range(STREAMED_VECTORS)  # of a panel

            def rows_of(start: Any, stride: Any) -> list[Any]:
                return [at(builder, start, builder.mul(stride, index(i))) for i in range(rows)]

            q_rows, out_rows = rows_of(q_start, q_stride), rows_of(out_start, out_stride)
            step_rows, sum_rows = rows_of(step_start, group_stride), rows_of(sum_start, group_stride)
            factor = splat(builder, minimum_factor)
            added = [load(builder, at(builder, bias_start, index(v * LANES * 4)), F32X16) for v in parts]
            cells = [(r, v) for r in range(rows) for v in parts]
            totals = {(r, v): cgutils.alloca_once_value(builder, added[v]) for r, v in cells}
            num_chains = max(1, _CHAINS // len(cells))
            with cgutils.for_range(builder, count) as loop:
                record = at(builder, weight_start, builder.mul(loop.index, record_bytes))
                if rows == TILE_ROWS:
                    for start, num_lines in ((ahead_start, ahead_lines), (other_start, other_lines)):
                        prefetch_lines(builder, start, builder.mul(loop.index, num_lines), num_lines)
                else:
                    prefetch_lines(
                        builder, at(builder, record, index(_AHEAD_BYTES)), index(0), index(_RECORD_LINES), level=1
                    )
                words = at(builder, record, builder.sub(record_bytes, index(PANEL * GROUP // 2)))
                first_input = builder.mul(loop.index, index(GROUP))
                chains = {cell: [constant(I32X16, 0)] * num_chains for cell in cells}
                for j in range(GROUP // STEP):
                    place = at(builder, words, index(j * PANEL * 4))
                    pairs = [load(builder, at(builder, place, index(v * LANES * 4)), I32X16) for v in parts]
                    for half in range(2):
                        quad = 2 * j + half
                        shifted = [builder.lshr(pair, constant(I32X16, 4)) for pair in pairs] if half else pairs
                        weights = [builder.and_(pair, constant(I32X16, _LOW_HALVES)) for pair in shifted]
                        offset = builder.add(first_input, index(quad * QUAD))
                        for r, q_row in enumerate(q_rows):
                            inputs = splat_at(builder, at(builder, q_row, offset), I32)
                            for v in parts:
                                chain, turn = chains[r, v], quad % num_chains
                                chain[turn] = dot_bytes(builder, signature.args[0], chain[turn], weights[v], inputs)
                scales = [load_elements(builder, at(builder, record, index(v * LANES * 2)), _FLOAT16) for v in parts]
                place = at(builder, record, minima)
                lows = [load_elements(builder, at(builder, place, index(v * LANES * 2)), _FLOAT16) for v in parts]
                lows = [builder.fmul(low, factor) for low in lows]
                number = builder.mul(loop.index, index(4))
                for r in range(rows):
                    step = splat_at(builder, at(builder, step_rows[r], number), F32)
                    sum_ = integers_to_float32(builder, splat_at(builder, at(builder, sum_rows[r], number), I32))
                    for v in parts:
                        product = chains[r, v][0]
                        for chain in chains[r, v][1:]:
                            product = builder.add(product, chain)
                        value = builder.fmul(integers_to_float32(builder, product), scales[v])
                        value = fma(builder, lows[v], sum_, value)
                        builder.store(fma(builder, value, step, builder.load(totals[r, v])), totals[r, v])
            for r, v in cells:
                store(builder, builder.load(totals[r, v]), at(builder, out_rows[r], index(v * LANES * 4)))
            return context.get_dummy_value()

        return types.void(kind, *[types.intp] * 8, types.float32, *[types.intp] * 8), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4 = (_tile(rows) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def multiply_tile(kind, rows, places):  # type: ignore[no-untyped-def]
    """out[rows, 48] of 1 to 4 rows; `places` are the other arguments of `_tile`."""
    if rows == 4:
        _tile_4(kind, *places)
    elif rows == 3:
        _tile_3(kind, *places)
    elif rows == 2:
        _tile_2(kind, *places)
    else:
        _tile_1(kind, *places)
