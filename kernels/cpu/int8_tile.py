"""Products of quantised rows and packed weights that stay in registers, as LLVM vector code.

A tile is a few rows by a few panels of 16 outputs. Over one group of 32 inputs its sums are exact integers; then they
are turned to float32 and added, by the row's scale of that group, to the totals:

    total[r, o] += scale[r, g] * (sum_i w[o, i] q[r, i] - 128 sum_i q[r, i])        w = q of the weight + 128

The instruction for four products and their sum (`vpdpbusd`) takes one factor unsigned, hence the 128; what it adds too
much is known when a row is quantised, and sums start from there. Groups follow one another in order, each with one
fused multiply-add, however many rows and panels a tile has and however many groups a call computes.

What a processor has decides how the four products are done (`DOT_KINDS`); the numbers are the same. On one Zen 5 core,
4 rows by 3 panels, 576 inputs, in 10^9 operations a second: 930 with 512-bit vectors, 480 with 256 bits, 240 without
such an instruction. Groups of 64 would make it 960, at a cost in precision: perplexity of SmolLM2-135M rises by 1.2 %
in place of 0.7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import extending, njit, types
from numba.core import cgutils

from kernels.cpu.registers import CACHE_LINE_BYTES
from kernels.int8_weight import GROUP, PANEL, QUAD

intrinsic: Any = extending.intrinsic  # its types are those of the implementation, not of the call

TILE_ROWS = 4
TILE_PANELS = 3  # 4 x 3 sums in both types, 3 vectors of weights and one of activations: 28 of 32 registers
_CHAINS = 8  # sums that have to be under way at once, or each waits for the last

# The type of a number says which code is compiled, as elements do in `kernels.cpu.numbers`.
DOT_KINDS = {"512 bits": np.int8(0), "256 bits": np.int16(0), "portable": np.int32(0)}

_INTEGER, _FLOAT = ir.IntType(32), ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(_INTEGER, PANEL), ir.VectorType(_FLOAT, PANEL)
_HALF = ir.VectorType(_INTEGER, PANEL // 2)


def dot_kind_of_this_cpu() -> str:
    """The fastest of `DOT_KINDS` that the processor has."""
    features = binding.get_host_cpu_features()
    if features.get("avx512vnni"):
        return "512 bits"
    return "256 bits" if features.get("avxvnni") else "portable"


def _tile(rows: int, panels: int) -> Any:
    """Compiles the product of a tile. Memory is given by its address, and the bytes from one row or panel to the next.

    `scales` (float32) and `sums` (int32, where a group's sums start) have one number a row and group.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        kind: Any,
        q: Any,
        q_stride: Any,
        scales: Any,
        sums: Any,
        group_stride: Any,
        weight: Any,
        weight_stride: Any,
        totals: Any,
        totals_stride: Any,
        num_groups: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            index = arguments[10].type

            def rows_of(start: Any, stride: Any, count: int) -> list[Any]:
                return [builder.add(start, builder.mul(stride, index(i))) for i in range(count)]

            q_rows = rows_of(arguments[1], arguments[2], rows)
            scale_rows = rows_of(arguments[3], arguments[5], rows)
            sum_rows = rows_of(arguments[4], arguments[5], rows)
            weight_panels = rows_of(arguments[6], arguments[7], panels)
            ends = {
                (r, p): builder.add(start, index(p * PANEL * 4))
                for r, start in enumerate(rows_of(arguments[8], arguments[9], rows))
                for p in range(panels)
            }
            running = {cell: cgutils.alloca_once(builder, _FLOATS) for cell in ends}
            for cell, place in ends.items():
                builder.store(_load(builder, place, _FLOATS), running[cell])
            num_chains = max(1, _CHAINS // len(ends))
            with cgutils.for_range(builder, arguments[10]) as loop:
                number = builder.mul(loop.index, index(4))
                first_input = builder.mul(loop.index, index(GROUP))
                first_weight = builder.mul(loop.index, index(GROUP * PANEL))
                begin = [_spread(builder, builder.add(start, number), _INTEGER) for start in sum_rows]
                chains = {(r, p): [begin[r], *[_ZEROS] * (num_chains - 1)] for r, p in ends}
                for quad in range(GROUP // QUAD):
                    turn, offset = quad % num_chains, builder.add(first_weight, index(quad * QUAD * PANEL))
                    weights = [_load(builder, builder.add(start, offset), _INTEGERS) for start in weight_panels]
                    offset = builder.add(first_input, index(quad * QUAD))
                    for r, start in enumerate(q_rows):
                        inputs = _spread(builder, builder.add(start, offset), _INTEGER)
                        for p in range(panels):
                            chain = chains[r, p]
                            chain[turn] = _dot(builder, signature.args[0], chain[turn], weights[p], inputs)
                for r, start in enumerate(scale_rows):
                    scale = _spread(builder, builder.add(start, number), _FLOAT)
                    for p in range(panels):
                        total = chains[r, p][0]
                        for chain in chains[r, p][1:]:
                            total = builder.add(total, chain)
                        result = _fma(builder, builder.sitofp(total, _FLOATS), scale, builder.load(running[r, p]))
                        builder.store(result, running[r, p])
            for cell, place in ends.items():
                _store(builder, builder.load(running[cell]), place)
            return context.get_dummy_value()

        return types.void(kind, *[types.intp] * 10), generate

    return tile


@intrinsic
def ask_for(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Has memory brought to the second cache level; it need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, count = arguments
        pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, *[_INTEGER] * 3]), "llvm.prefetch.p0"
        )
        step = count.type(CACHE_LINE_BYTES)
        with cgutils.for_range_slice(builder, count.type(0), count, step) as (offset, _):
            place = builder.inttoptr(builder.add(start, offset), pointer)
            builder.call(function, [place, _INTEGER(0), _INTEGER(2), _INTEGER(1)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def finish_panel(
    typing_context: Any,
    element: Any,
    totals: Any,
    totals_stride: Any,
    scale: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    num_rows: Any,
) -> Any:
    """out[r, 16] = totals[r, 16] * scale[16] + bias[16] for each row; all by their address, strides in bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, totals_start, totals_row, scale_start, bias_start, out_start, out_row, count = arguments
        factor, added = _load(builder, scale_start, _FLOATS), _load(builder, bias_start, _FLOATS)
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(totals_start, builder.mul(loop.index, totals_row))
            result = _fma(builder, _load(builder, place, _FLOATS), factor, added)
            if element == types.uint16:
                result = _to_bfloat16(builder, result)
            _store(builder, result, builder.add(out_start, builder.mul(loop.index, out_row)))
        return context.get_dummy_value()

    return types.void(element, *[types.intp] * 7), generate


def _to_bfloat16(builder: Any, values: Any) -> Any:
    """Sixteen float32 rounded to nearest, ties to even; NaN stays NaN, as its first mantissa bit is set."""
    bits = builder.bitcast(values, _INTEGERS)
    odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
    rounded = builder.add(builder.add(bits, _constant(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _constant(16)), ir.VectorType(ir.IntType(16), PANEL))


def _dot(builder: Any, kind: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """sums i32[16], to each added four products of an unsigned byte of a weight and a signed one of an input."""
    if kind == types.int8:
        return builder.call(_vpdpbusd(builder, _INTEGERS, "512"), [sums, weights, inputs])
    if kind == types.int16:
        function = _vpdpbusd(builder, _HALF, "256")
        halves = []
        for lanes in (range(PANEL // 2), range(PANEL // 2, PANEL)):
            chosen = ir.Constant(_HALF, list(lanes))
            halves.append(
                builder.call(function, [builder.shuffle_vector(x, x, chosen) for x in (sums, weights, inputs)])
            )
        return builder.shuffle_vector(*halves, ir.Constant(_INTEGERS, list(range(PANEL))))
    # LLVM sees that all factors fit 16 bits and takes the instruction for two such products, where there is one.
    for byte in range(QUAD):
        weight = builder.and_(builder.lshr(weights, _constant(8 * byte)), _constant(255))
        value = builder.ashr(builder.shl(inputs, _constant(24 - 8 * byte)), _constant(24))
        sums = builder.add(sums, builder.mul(weight, value))
    return sums


def _vpdpbusd(builder: Any, vector: Any, width: str) -> Any:
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.x86.avx512.vpdpbusd.{width}"
    )


def _constant(number: int) -> Any:
    return ir.Constant(_INTEGERS, [number] * PANEL)


_ZEROS = _constant(0)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, values: Any, address: Any) -> None:
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=2)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{PANEL}f32"
    )
    return builder.call(function, [a, b, c])


def _spread(builder: Any, address: Any, kind: Any) -> Any:
    """The number at an address in all lanes."""
    vector = ir.VectorType(kind, PANEL)
    nothing = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(nothing, _load(builder, address, kind), _INTEGER(0))
    return builder.shuffle_vector(single, nothing, _ZEROS)


_tile_1x1, _tile_2x1, _tile_3x1, _tile_4x1 = (_tile(rows, 1) for rows in (1, 2, 3, 4))
_tile_1x3, _tile_2x3, _tile_3x3, _tile_4x3 = (_tile(rows, 3) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def multiply_add(  # type: ignore[no-untyped-def]
    kind, rows, panels, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups
):
    """totals[rows, 16 panels] += what `groups` groups give, for up to 4 rows and up to 3 panels; see `_tile`."""
    if panels == TILE_PANELS:
        if rows == 4:
            _tile_4x3(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        elif rows == 3:
            _tile_3x3(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        elif rows == 2:
            _tile_2x3(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        else:
            _tile_1x3(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        return
    for _ in range(panels):
        if rows == 4:
            _tile_4x1(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        elif rows == 3:
            _tile_3x1(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        elif rows == 2:
            _tile_2x1(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        else:
            _tile_1x1(kind, q, q_row, scales, sums, groups_row, weight, panel_bytes, totals, row_bytes, groups)
        weight += panel_bytes
        totals += PANEL * 4
