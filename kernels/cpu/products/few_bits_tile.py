"""Products with weights of few bits, and such weights as float32, as LLVM vector code; see `few_bits`.

An integer of 4 bits becomes float32 by one permutation of a register that holds all sixteen of them, which looks at the
lowest four bits of a lane alone; one of 8 bits is widened and converted. A fused multiply-add, or a product, then gives
the weight's own bits. Rows are multiplied by these numbers where they are made. Where there are more rows than a tile
has, the first of them write the numbers of a piece of a panel out, and the others stream it, which gives the same sums:
they run over the inputs in order in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu.products.few_bits import FORMATS, GROUP, STEP, FewBits
from kernels.cpu.vectors.float_tile import PANEL, STREAMED_ROWS, STREAMED_VECTORS
from kernels.cpu.vectors.processor import HAS_WIDE_REGISTERS
from kernels.cpu.vectors.vector_code import (
    CACHE_LINE_BYTES,
    F32,
    F32X16,
    I8X16,
    I32X16,
    LANES,
    at,
    call,
    constant,
    fma,
    integers_to_float32,
    intrinsic,
    load,
    load_elements,
    pinned,
    prefetch_bytes,
    splat_at,
    store,
)

FORMAT_OF = {types.int32: FORMATS[torch.int32], types.uint8: FORMATS[torch.uint8], types.int8: FORMATS[torch.int8]}
MOST_ROWS = 8  # above which it is faster to write weights out once: each tile makes them anew

_FLOAT16 = types.int16  # as an element, see `numbers`


def _multiply_add(rows: int, *, writes: bool = False) -> Any:
    """Compiles C[rows, 48] = S + A[rows, 32 groups] . W[32 groups, 48] with C in registers.

    A, S and C are float32; S may be one line whose stride is 0. Memory is given by its address, strides in bytes, and
    so is `ahead`: what lies so far behind each record is prefetched meanwhile, for the first cache level. One that
    `writes` leaves W at `out` as f32[32 groups, 48], and prefetches the second level: it is long until the next record.
    """

    @intrinsic
    def multiply_add(
        typing_context: Any,
        element: Any,
        a: Any,
        a_stride: Any,
        weight: Any,
        s: Any,
        s_stride: Any,
        c: Any,
        c_stride: Any,
        groups: Any,
        ahead: Any,
        out: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, a_start, a_row, weight_start, s_start, s_row, c_start, c_row, count, distance, out_start = arguments
            few, index = FORMAT_OF[signature.args[0]], count.type
            is_full = HAS_WIDE_REGISTERS and rows > 4  # its sums leave registers for one input's numbers
            a_rows = [at(builder, a_start, builder.mul(a_row, index(r))) for r in range(rows)]
            sources, places = (
                {
                    (r, v): at(builder, start, builder.add(builder.mul(row, index(r)), index(v * LANES * 4)))
                    for r in range(rows)
                    for v in range(STREAMED_VECTORS)
                }
                for start, row in ((s_start, s_row), (c_start, c_row))
            )
            sums = {cell: cgutils.alloca_once(builder, F32X16) for cell in places}
            for cell, source in sources.items():
                builder.store(load(builder, source, F32X16), sums[cell])
            with cgutils.for_range(builder, count) as group:
                record = at(builder, weight_start, builder.mul(group.index, index(few.record_bytes)))
                level = 2 if writes else 1
                for k, values in _numbers(builder, few, record, distance, level, is_full):
                    row = builder.add(builder.mul(group.index, index(GROUP)), k)
                    if writes:
                        line = at(builder, out_start, builder.mul(row, index(PANEL * 4)))
                        for v, value in enumerate(values):
                            store(builder, value, at(builder, line, index(v * LANES * 4)))
                    for r in range(rows):
                        place = at(builder, a_rows[r], builder.mul(row, index(4)))
                        factor = splat_at(builder, place, F32)
                        for v, value in enumerate(values):
                            total = fma(builder, factor, value, builder.load(sums[r, v]))
                            builder.store(pinned(builder, total) if is_full else total, sums[r, v])
            for cell, place in places.items():
                store(builder, builder.load(sums[cell]), place)
            return context.get_dummy_value()

        return types.void(element, *[types.intp] * 10), generate

    return multiply_add


@intrinsic
def record_bytes(typing_context: Any, element: Any) -> Any:
    """Of the format that `element` stands for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.intp, FORMAT_OF[signature.args[0]].record_bytes)

    return types.intp(element), generate


def _numbers(
    builder: Any, few: FewBits, record: Any, ahead: Any, level: int, is_full: bool
) -> Iterator[tuple[Any, list[Any]]]:
    """The float32 numbers of a record: an input's number in the group, and 16 outputs a vector.

    What the caller emits for each of the `STEP` inputs becomes the body of a loop over the group. In it the lines that
    lie `ahead` bytes behind are prefetched, some a turn: all at once they made a row of 8 bits 1.7 times slower. Where
    registers are `is_full` of sums, scales and minima are read from memory for each input, and so are the integers if
    the caller has `pinned` what it computed from the last ones.
    """
    index = record.type

    def halves_from(first: int) -> list[Any]:
        places = [at(builder, record, index((first + v * LANES) * 2)) for v in range(STREAMED_VECTORS)]
        return [_kept(builder, load_elements(builder, place, _FLOAT16), is_full) for place in places]

    scales, minima = halves_from(0), halves_from(PANEL) if few.has_minimum else []
    vector_bytes = LANES if few.bits == 8 else LANES * 4
    with cgutils.for_range(builder, index(GROUP // STEP)) as step:
        num_bytes = few.record_bytes // (GROUP // STEP)
        distance = builder.add(ahead, builder.mul(step.index, index(num_bytes)))
        prefetch_bytes(builder, at(builder, record, distance), num_bytes, level=level)
        offset = builder.add(builder.mul(step.index, index(PANEL * STEP * few.bits // 8)), index(few.integers_offset))
        place = at(builder, record, offset)
        places = [at(builder, place, index(v * vector_bytes)) for v in range(STREAMED_VECTORS)]
        for i in range(STEP):
            if few.bits == 4:
                words = [load(builder, place, I32X16) for place in places]
                integers = [_of_four_bits(builder, few, builder.lshr(word, constant(I32X16, 4 * i))) for word in words]
            else:
                of_bytes = [load(builder, at(builder, place, index(i * PANEL)), I8X16) for place in places]
                integers = [integers_to_float32(builder, numbers) for numbers in of_bytes]
            factors, terms = ([builder.load(place) for place in kept] for kept in (scales, minima))
            if few.has_minimum:
                values = [fma(builder, *numbers) for numbers in zip(factors, integers, terms, strict=True)]
            else:
                values = [builder.fmul(*numbers) for numbers in zip(factors, integers, strict=True)]
            yield builder.add(builder.mul(step.index, index(STEP)), index(i)), values


def _kept(builder: Any, vector: Any, in_memory: bool) -> Any:
    """A variable that is `vector`: in a register where LLVM has one, or else `in_memory` that no cache line divides."""
    place = cgutils.alloca_once(builder, vector.type)
    place.align = CACHE_LINE_BYTES
    builder.store(vector, place)
    if in_memory:  # who knows its address might change it, as far as LLVM sees
        builder.asm(ir.FunctionType(ir.VoidType(), [place.type]), "", "r,~{memory}", [place], True)
    return place


def _of_four_bits(builder: Any, few: FewBits, lanes: Any) -> Any:
    """The integers that the lowest four bits of 16 lanes stand for, as float32."""
    if HAS_WIDE_REGISTERS:
        table = ir.Constant(F32X16, [float(few.least + i) for i in range(LANES)])
        return call(builder, "llvm.x86.avx512.permvar.sf.512", F32X16, table, lanes)
    integers = builder.add(builder.and_(lanes, constant(I32X16, 15)), constant(I32X16, few.least))
    return integers_to_float32(builder, integers)


_add_1, _add_2, _add_3, _add_4, _add_5, _add_6, _add_7, _add_8 = (_multiply_add(rows) for rows in range(1, 9))
multiply_add_and_write = _multiply_add(STREAMED_ROWS, writes=True)


@njit(nogil=True)
def multiply_add(element, rows, a, a_stride, weight, s, c, c_stride, groups, ahead):  # type: ignore[no-untyped-def]
    """C[rows, 48] = S[48] + A[rows, 32 groups] . W; see `_multiply_add`."""
    row = 0
    while row < rows:
        left, places = rows - row, (a + row * a_stride, a_stride, weight, s, 0, c + row * c_stride, c_stride)
        # Each tile makes the numbers anew, so that there is one for each number of rows that registers have place for.
        if left >= 8 and STREAMED_ROWS >= 8:
            _add_8(element, *places, groups, ahead, 0)
            row += 8
        elif left == 7 and STREAMED_ROWS >= 8:
            _add_7(element, *places, groups, ahead, 0)
            row += 7
        elif left == 6 and STREAMED_ROWS >= 8:
            _add_6(element, *places, groups, ahead, 0)
            row += 6
        elif left == 5 and STREAMED_ROWS >= 8:
            _add_5(element, *places, groups, ahead, 0)
            row += 5
        elif left >= 4:
            _add_4(element, *places, groups, ahead, 0)
            row += 4
        elif left == 3:
            _add_3(element, *places, groups, ahead, 0)
            row += 3
        elif left == 2:
            _add_2(element, *places, groups, ahead, 0)
            row += 2
        else:
            _add_1(element, *places, groups, ahead, 0)
            row += 1
