"""Products of quantised rows and packed weights that stay in registers, as LLVM vector code.

A tile is a few rows by a few panels of 16 outputs. Over one group of 32 inputs its sums are exact integers; then they
are turned to float32 and added, by the row's scale of that group, to the totals; these get the outputs' scales at last:

    total[r, o] += scale[r, g] * (sum_i w[o, i] q[r, i] - 128 sum_i q[r, i])        w = q of the weight + 128
    out[r, o] = total[r, o] * scale[o] + bias[o]

The instruction for four products and their sum (`vpdpbusd`) takes one factor unsigned, hence the 128; what it adds too
much is known when a row is quantised, and sums start from there. Groups follow one another in order, each with one
fused multiply-add, however many rows and panels a tile has.

On one Zen 5 core, 256 rows by 960 x 576, in 10^9 operations a second: 867 with 512-bit vectors, 436 with 256 bits, 226
without an instruction for four products. At 4.1 GHz its two multipliers could do 930: eight of nine turns are products,
the ninth is the scale. Groups of 64 would make it 990, at a cost in precision: perplexity of SmolLM2-135M rises by 1.2
% in place of 0.7. Tiles of 6 x 2 and 3 x 4 are 1 to 5 % slower than 4 x 3, of 12 x 1 a quarter.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils

from kernels.cpu.vectors.dot_products import dot_bytes
from kernels.cpu.vectors.vector_code import (
    CACHE_LINE_BYTES,
    F32,
    F32X16,
    I32,
    I32X16,
    at,
    constant,
    fma,
    integers_to_float32,
    intrinsic,
    load,
    prefetch_lines,
    splat_at,
    store_elements,
)
from kernels.int8_weight import GROUP, PANEL, QUAD

TILE_ROWS = 4
TILE_PANELS = 3  # 4 x 3 sums in both types, 3 vectors of weights and one of activations: 28 of 32 registers
# One row by 49152 x 576 out of memory, two threads: 642 us, and 713 where the processor finds the next weights itself;
# two rows 677 and 764.
_AHEAD_BYTES = 4 << 10
_CHAINS = 8  # sums that have to be under way at once, or each waits for the last


def _tile(rows: int, panels: int) -> Any:
    """Compiles the product of a tile. Memory is given by its address, and the bytes from one row or panel to the next.

    `scales` (float32) and `sums` (int32, where a group's sums start) have one number a row and group, `factors` and
    `bias` (float32) one an output. With each group, `ahead_lines` cache lines from `ahead` on are prefetched; tiles of
    fewer rows, which are alone with a panel or the last to read it, prefetch what lies shortly behind instead.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        kind: Any,
        element: Any,
        q: Any,
        q_stride: Any,
        scales: Any,
        sums: Any,
        group_stride: Any,
        weight: Any,
        weight_stride: Any,
        factors: Any,
        bias: Any,
        out: Any,
        out_stride: Any,
        num_groups: Any,
        ahead: Any,
        ahead_lines: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (
                q_start,
                q_stride,
                scale_start,
                sum_start,
                group_stride,
                weight_start,
                weight_stride,
                factor_start,
                bias_start,
                out_start,
                out_stride,
                count,
                ahead_start,
                ahead_lines,
            ) = arguments[2:]
            index = count.type

            def rows_of(start: Any, stride: Any, number: int) -> list[Any]:
                return [at(builder, start, builder.mul(stride, index(i))) for i in range(number)]

            q_rows = rows_of(q_start, q_stride, rows)
            scale_rows = rows_of(scale_start, group_stride, rows)
            sum_rows = rows_of(sum_start, group_stride, rows)
            weight_panels = rows_of(weight_start, weight_stride, panels)
            cells = [(r, p) for r in range(rows) for p in range(panels)]
            totals = {cell: cgutils.alloca_once_value(builder, constant(F32X16, 0.0)) for cell in cells}
            num_chains = max(1, _CHAINS // len(cells))
            with cgutils.for_range(builder, count) as loop:
                number = builder.mul(loop.index, index(4))
                first_input = builder.mul(loop.index, index(GROUP))
                first_weight = builder.mul(loop.index, index(GROUP * PANEL))
                if rows == TILE_ROWS:
                    prefetch_lines(builder, ahead_start, builder.mul(loop.index, ahead_lines), ahead_lines)
                else:
                    num_lines = index(GROUP * PANEL // CACHE_LINE_BYTES)
                    offset = builder.add(first_weight, index(_AHEAD_BYTES))
                    for start in weight_panels:
                        prefetch_lines(builder, at(builder, start, offset), index(0), num_lines, level=1)
                begin = [splat_at(builder, at(builder, start, number), I32) for start in sum_rows]
                chains = {(r, p): [begin[r], *[constant(I32X16, 0)] * (num_chains - 1)] for r, p in cells}
                for quad in range(GROUP // QUAD):
                    turn, offset = quad % num_chains, builder.add(first_weight, index(quad * QUAD * PANEL))
                    weights = [load(builder, at(builder, start, offset), I32X16) for start in weight_panels]
                    offset = builder.add(first_input, index(quad * QUAD))
                    for r, start in enumerate(q_rows):
                        inputs = splat_at(builder, at(builder, start, offset), I32)
                        for p in range(panels):
                            chain = chains[r, p]
                            chain[turn] = dot_bytes(builder, signature.args[0], chain[turn], weights[p], inputs)
                for r, start in enumerate(scale_rows):
                    scale = splat_at(builder, at(builder, start, number), F32)
                    for p in range(panels):
                        sum_ = chains[r, p][0]
                        for chain in chains[r, p][1:]:
                            sum_ = builder.add(sum_, chain)
                        total = fma(builder, integers_to_float32(builder, sum_), scale, builder.load(totals[r, p]))
                        builder.store(total, totals[r, p])
            out_rows = rows_of(out_start, out_stride, rows)
            for p in range(panels):
                place = index(p * PANEL * 4)
                factor, added = (
                    load(builder, at(builder, start, place), F32X16) for start in (factor_start, bias_start)
                )
                place = index(p * PANEL * signature.args[1].bitwidth // 8)
                for r in range(rows):
                    result = fma(builder, builder.load(totals[r, p]), factor, added)
                    store_elements(builder, result, at(builder, out_rows[r], place), signature.args[1])
            return context.get_dummy_value()

        return types.void(kind, element, *[types.intp] * 14), generate

    return tile


_tile_1x1, _tile_2x1, _tile_3x1, _tile_4x1 = (_tile(rows, 1) for rows in (1, 2, 3, 4))
_tile_1x3, _tile_2x3, _tile_3x3, _tile_4x3 = (_tile(rows, 3) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def multiply_tile(kind, element, rows, panels, places):  # type: ignore[no-untyped-def]
    """out[rows, 16 panels] of 1 to 4 rows and 1 or 3 panels; `places` are the other arguments of `_tile`."""
    if panels == TILE_PANELS:
        if rows == 4:
            _tile_4x3(kind, element, *places)
        elif rows == 3:
            _tile_3x3(kind, element, *places)
        elif rows == 2:
            _tile_2x3(kind, element, *places)
        else:
            _tile_1x3(kind, element, *places)
    elif rows == 4:
        _tile_4x1(kind, element, *places)
    elif rows == 3:
        _tile_3x1(kind, element, *places)
    elif rows == 2:
        _tile_2x1(kind, element, *places)
    else:
        _tile_1x1(kind, element, *places)
