"""Rows of activations to eight bits, group by group of 32, as LLVM vector code.

    scale[g] = max_i |x[i]| / 127,   q[i] = round(x[i] / scale[g]),   over the 32 inputs of group g

A group that holds NaN or an infinity gets the scale NaN, and with it everything that is computed of the row. One whose
numbers are all below 1e-30 counts as zeros: 127 / max has to be finite.

A row is gone through three times, and stays in the first cache level: for the largest of each group, for the scales,
sixteen groups at a time, as a division takes long, and for the numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import register_jitable

from kernels.cpu.shared_work import shared
from kernels.cpu.vectors.numbers import FLOAT32, address_of, lines, to_float32
from kernels.cpu.vectors.vector_code import (
    F32,
    F32X16,
    I8X16,
    I32,
    I32X16,
    LANES,
    at,
    constant,
    intrinsic,
    load,
    load_elements,
    reduce,
    shuffle,
    splat_at,
    store,
)
from kernels.int8_weight import GROUP, QUAD_ORDER, ZERO

_ROWS_OF_ITEM = 8
_SMALLEST = 1e-30
_INFINITY_BITS = 0x7F800000  # those of NaN are larger
# A float32 between 2^23 and 2^24 has no fraction: adding 1.5 * 2^23 rounds to nearest, ties to even, and leaves the
# integer in the low bits.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
_ORDER = [first + i for first in range(0, LANES, len(QUAD_ORDER)) for i in QUAD_ORDER]


@register_jitable  # or the first start of every worker would compile it, for a fifth of a second
def workspace_bytes(num_rows, num_in):  # type: ignore[no-untyped-def]
    """Bytes of so many quantised rows with what is known of their groups."""
    num_groups = (num_in + GROUP - 1) // GROUP
    return num_rows * (num_groups * GROUP + 2 * bytes_of_groups(num_groups))


@register_jitable
def bytes_of_groups(num_groups):  # type: ignore[no-untyped-def]
    """From one row's scales or sums to the next row's: 4 a group, for a multiple of 16 groups."""
    return (num_groups + LANES - 1) // LANES * LANES * 4


@njit(nogil=True)
def rows_in(workspace, num_rows, num_in):  # type: ignore[no-untyped-def]
    """Quantised rows in the workspace at an address: the addresses of q, scales, sums, and how many rows and groups.

    q int8 [num_rows, 32 num_groups], scales float32 and sums (-128 times a group's sum of q) int32 [num_rows, groups].
    """
    num_groups = (num_in + GROUP - 1) // GROUP
    sums = workspace + num_rows * bytes_of_groups(num_groups)
    return sums + num_rows * bytes_of_groups(num_groups), workspace, sums, num_rows, num_groups


@njit(nogil=True)
def items_of_rows(num_rows):  # type: ignore[no-untyped-def]
    """How many items quantising has, of a few rows each."""
    return (num_rows + _ROWS_OF_ITEM - 1) // _ROWS_OF_ITEM


@njit(nogil=True)
def quantize_some(item, end, element, x, x_row, num_in, rows):  # type: ignore[no-untyped-def]
    """One item of `items_of_rows`: from x, `x_row` bytes a row, to `rows`; see `rows_in` and `shared_work.shared`."""
    q, scales, sums, num_rows, num_groups = rows
    group_row = bytes_of_groups(num_groups)
    factors, tail = np.empty(group_row // 4, dtype=np.float32), np.zeros(GROUP, dtype=np.float32)
    for t in range(item * _ROWS_OF_ITEM, min((item + 1) * _ROWS_OF_ITEM, num_rows)):
        _quantize_row(
            element,
            x + t * x_row,
            num_in,
            q + t * num_groups * GROUP,
            scales + t * group_row,
            sums + t * group_row,
            address_of(factors),
            address_of(tail),
        )


quantize_rows = shared(quantize_some)


@njit(nogil=True)
def _quantize_row(element, x, size, q, scales, sums, factors, tail):  # type: ignore[no-untyped-def]
    """`size` elements. `factors` has space for as many float32 as a row has scales, `tail` for 32 that end in zeros.

    All are addresses: making an array of each row took as long as quantising 50 groups.
    """
    whole, num_groups = size // GROUP, (size + GROUP - 1) // GROUP
    _largest(element, x, scales, whole)
    if whole < num_groups:  # zeros fill it up
        rest, line = lines(tail, FLOAT32, 1, GROUP)[0], lines(x, element, 1, size)[0]
        for i in range(whole * GROUP, size):
            rest[i - whole * GROUP] = to_float32(line[i])
        _largest(FLOAT32, tail, scales + whole * 4, 1)
    _scales_of_largest(scales, factors, (num_groups + LANES - 1) // LANES)
    _round_groups(element, x, factors, q, sums, whole)
    if whole < num_groups:
        _round_groups(FLOAT32, tail, factors + whole * 4, q + whole * GROUP, sums + whole * 4, 1)


@intrinsic
def _largest(typing_context: Any, element: Any, x: Any, largest: Any, num_groups: Any) -> Any:
    """largest[g] = max |x| of each group, NaN above all."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, x_start, largest_start, count = arguments
        with cgutils.for_range(builder, count) as loop:
            # As integers, the bits of magnitudes are ordered as these are.
            sizes = [
                builder.and_(builder.bitcast(values, I32X16), constant(I32X16, 0x7FFFFFFF))
                for _, values in _group(builder, x_start, loop.index, signature.args[0])
            ]
            most_of_two = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
            most = reduce(builder, "umax", most_of_two)
            store(builder, most, _at(builder, largest_start, loop.index, 4))
        return context.get_dummy_value()

    return types.void(element, *[types.intp] * 3), generate


@intrinsic
def _scales_of_largest(typing_context: Any, scales: Any, factors: Any, num_vectors: Any) -> Any:
    """Of `scales` = the largest of each group: the groups' scales, and in `factors` their inverses, 0 for none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scales_start, factors_start, count = arguments
        with cgutils.for_range(builder, count) as loop:
            place = _at(builder, scales_start, loop.index, 4 * LANES)
            bits = load(builder, place, I32X16)
            most = builder.bitcast(bits, F32X16)
            is_broken = builder.icmp_unsigned(">=", bits, constant(I32X16, _INFINITY_BITS))
            is_zero = builder.fcmp_ordered("<", most, constant(F32X16, _SMALLEST))
            factor = builder.fdiv(constant(F32X16, 127.0), most)
            factor = builder.select(builder.or_(is_broken, is_zero), constant(F32X16, 0.0), factor)
            scale = builder.select(is_zero, constant(F32X16, 0.0), builder.fdiv(most, constant(F32X16, 127.0)))
            store(builder, builder.select(is_broken, constant(F32X16, math.nan), scale), place)
            store(builder, factor, _at(builder, factors_start, loop.index, 4 * LANES))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _round_groups(typing_context: Any, element: Any, x: Any, factors: Any, q: Any, sums: Any, num_groups: Any) -> Any:
    """q = round(x * factor of the group), and -128 times each group's sum of them; of NaN, no matter what."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, x_start, factors_start, q_start, sums_start, count = arguments
        with cgutils.for_range(builder, count) as loop:
            factor = splat_at(builder, _at(builder, factors_start, loop.index, 4), F32)
            total = constant(I32X16, 0)
            for place, values in _group(builder, x_start, loop.index, signature.args[0]):
                rounded = builder.fadd(builder.fmul(values, factor), constant(F32X16, _ROUNDER))
                bits = builder.bitcast(rounded, I32X16)
                total = builder.add(total, bits)
                numbers = builder.trunc(bits, I8X16)
                store(builder, shuffle(builder, numbers, numbers, _ORDER), at(builder, q_start, place))
            sum_ = reduce(builder, "add", total)
            sum_ = builder.sub(sum_, I32(GROUP * _ROUNDER_BITS % 2**32))
            store(builder, builder.mul(sum_, I32(-ZERO)), _at(builder, sums_start, loop.index, 4))
        return context.get_dummy_value()

    return types.void(element, *[types.intp] * 5), generate


def _group(builder: Any, start: Any, number: Any, element: Any) -> list[tuple[Any, Any]]:
    """The numbers of a group as vectors of float32, each with the place of its first in the row."""
    places = [
        builder.add(builder.mul(number, number.type(GROUP)), number.type(first)) for first in range(0, GROUP, LANES)
    ]
    size = number.type(element.bitwidth // 8)
    return [(place, load_elements(builder, at(builder, start, builder.mul(place, size)), element)) for place in places]


def _at(builder: Any, start: Any, number: Any, size: int) -> Any:
    return at(builder, start, builder.mul(number, number.type(size)))
