"""The softmax of rows of 64 scores in registers, as LLVM vector code; 16 numbers at a time.

    e^x = 2^n (1 + r + r^2 P(r)),   n = round(x log2 e),   r = x - n ln 2

with P as in Cephes `expf`: within 1 ulp for x <= 0, 0 below -87, and NaN of NaN, so that a broken key does not just
disappear. 2^n is added to the exponent's bits. Maxima and sums are taken over vectors and then over lanes, in one order
on every machine. Three rows take 36 ns on a Zen 5 core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu.attention.attention_tiles import KEY_TILE
from kernels.cpu.vectors.numbers import LN2_HIGH, LN2_LOW, LOG2_E, exp
from kernels.cpu.vectors.vector_code import (
    F32X16,
    I32,
    I32X16,
    LANES,
    at,
    call,
    constant,
    element,
    fma,
    intrinsic,
    larger,
    load,
    reduce_rows,
    splat,
    store,
)

NO_MAXIMUM = np.float32(-1e30)  # of a row that has met no key: finite, as what is subtracted from scores

_HIDDEN = np.float32(-np.inf)  # a score whose weight is zero

_LOWEST = -87.0  # e to less than this is no normal float32
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_FLAT = types.Array(types.float32, 1, "C")


def _compile_softmax(num_rows: int) -> Any:
    """Compiles the softmax of rows of 64 scores that lie one after the other; see `softmax`."""

    @intrinsic
    def softmax_rows(
        typing_context: Any,
        scores: Any,
        scores_offset: Any,
        maxima: Any,
        maxima_offset: Any,
        sums: Any,
        sums_offset: Any,
        acc: Any,
        acc_offset: Any,
        width: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            start, maxima, sums, acc = (element(context, builder, signature, arguments, i) for i in (0, 2, 4, 6))
            width = arguments[8]
            rows = [ir.Constant(ir.IntType(64), r) for r in range(num_rows)]
            places = [_vectors(builder, at(builder, start, builder.mul(r, r.type(KEY_TILE)))) for r in rows]
            of_rows = [[load(builder, place, F32X16) for place in of_row] for of_row in places]
            for r, largest in zip(rows, reduce_rows(builder, of_rows, larger), strict=True):
                maximum, total = at(builder, maxima, r), at(builder, sums, r)
                last = builder.load(maximum)
                with builder.if_then(builder.fcmp_ordered(">", largest, last)):
                    shrink = context.compile_internal(
                        builder, _shrink, types.float32(types.float32, types.float32), (last, largest)
                    )
                    builder.store(largest, maximum)
                    builder.store(builder.fmul(builder.load(total), shrink), total)
                    _scale(builder, at(builder, acc, builder.mul(r, width)), width, shrink)
            for r, of_row in enumerate(places):
                maximum = splat(builder, builder.load(at(builder, maxima, rows[r])))
                of_row_scores = [load(builder, place, F32X16) for place in of_row]
                of_rows[r] = [_exp(builder, builder.fsub(score, maximum)) for score in of_row_scores]
                for weights, place in zip(of_rows[r], of_row, strict=True):
                    store(builder, weights, place)
            for r, more in zip(rows, reduce_rows(builder, of_rows, _sum), strict=True):
                total = at(builder, sums, r)
                builder.store(builder.fadd(builder.load(total), more), total)
            return context.get_dummy_value()

        number = types.intp
        return types.void(_FLAT, number, _FLAT, number, _FLAT, number, _FLAT, number, number), generate

    return softmax_rows


@intrinsic
def _fill_outside(typing_context: Any, scores: Any, offset: Any, start: Any, end: Any, value: Any) -> Any:
    """64 scores become `value`, all but start : end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, end = (splat(builder, builder.trunc(number, I32)) for number in arguments[2:4])
        value = splat(builder, arguments[4])
        for first, place in enumerate(_vectors(builder, element(context, builder, signature, arguments, 0))):
            keys = ir.Constant(I32X16, list(range(first * LANES, (first + 1) * LANES)))
            is_inside = builder.and_(builder.icmp_signed(">=", keys, start), builder.icmp_signed("<", keys, end))
            store(builder, builder.select(is_inside, load(builder, place, F32X16), value), place)
        return context.get_dummy_value()

    number = types.int64
    return types.void(_FLAT, types.intp, number, number, types.float32), generate


@intrinsic
def multiply_by(typing_context: Any, numbers: Any, offset: Any, count: Any, factor: Any) -> Any:
    """`count` float32 numbers from `offset` on, a multiple of 16 of them, become `factor` times as much."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _scale(builder, element(context, builder, signature, arguments, 0), *arguments[2:])
        return context.get_dummy_value()

    return types.void(_FLAT, types.intp, types.int64, types.float32), generate


def _vectors(builder: Any, start: Any) -> list[Any]:
    return [at(builder, start, ir.Constant(ir.IntType(64), key)) for key in range(0, KEY_TILE, LANES)]


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _scale(builder: Any, start: Any, count: Any, factor: Any) -> None:
    factor = splat(builder, factor)
    with cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES)) as (first, _):
        place = at(builder, start, first)
        store(builder, builder.fmul(load(builder, place, F32X16), factor), place)


def _shrink(last, largest):  # type: ignore[no-untyped-def]
    return exp(last - largest)


def _exp(builder: Any, x: Any) -> Any:
    def number(value: float) -> Any:
        return constant(F32X16, value)

    inside = larger(builder, x, number(_LOWEST))
    n = call(builder, f"llvm.nearbyint.v{LANES}f32", F32X16, builder.fmul(inside, number(float(LOG2_E))))
    r = fma(builder, n, number(-float(LN2_LOW)), fma(builder, n, number(-float(LN2_HIGH)), inside))
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fma(builder, p, r, number(coefficient))
    power = builder.fadd(fma(builder, p, builder.fmul(r, r), r), number(1.0))
    exponent = builder.shl(builder.fptosi(n, I32X16), constant(I32X16, 23))
    result = builder.bitcast(builder.add(builder.bitcast(power, I32X16), exponent), F32X16)
    zero_or_nan = builder.select(builder.fcmp_ordered("<", x, number(0.0)), number(0.0), x)
    return builder.select(builder.fcmp_ordered(">=", x, number(_LOWEST)), result, zero_or_nan)


_softmax_1, _softmax_2, _softmax_3, _softmax_4 = (_compile_softmax(rows) for rows in (1, 2, 3, 4))


@njit(nogil=True, fastmath={"contract"})
def _bias(scores, offset, distance, cap, slope):  # type: ignore[no-untyped-def]
    """Soft cap and ALiBi; `distance` is the first key's position minus the query's."""
    for j in range(KEY_TILE):
        score = scores[offset + j]
        if cap > np.float32(0.0):
            score = cap * np.tanh(score / cap)
        scores[offset + j] = score + slope * np.float32(distance + j)


@njit(nogil=True)
def mask(scores, offset, distance, slope, window, cap):  # type: ignore[no-untyped-def]
    """Of a row's 64 scores those of keys after its token, or before its window, become -inf; the others get soft cap
    and ALiBi. `distance` is the first key's position minus the token's."""
    if cap > np.float32(0.0) or slope != np.float32(0.0):
        _bias(scores, offset, distance, cap, slope)
    visible_start = max(0, 1 - window - distance) if window > 0 else 0
    visible_end = min(KEY_TILE, 1 - distance)
    if visible_end - visible_start < KEY_TILE:
        _fill_outside(scores, offset, visible_start, visible_end, _HIDDEN)


@njit(nogil=True)
def softmax(rows, scores, offset, maxima, sums, row, acc, width):  # type: ignore[no-untyped-def]
    """The scores of up to 4 rows, 64 each from `offset` on, become their weights: e^(score - maximum), 0 where hidden.

    Maxima and sums of rows `row` and following go on in `maxima` and `sums`, and what they have added up so far,
    acc[row * width :], is scaled to a new maximum. Whole arrays and places in them, as the references of a slice are
    counted: a prompt of 1,500 tokens took a fifth longer.
    """
    if rows == 4:
        _softmax_4(scores, offset, maxima, row, sums, row, acc, row * width, width)
    elif rows == 3:
        _softmax_3(scores, offset, maxima, row, sums, row, acc, row * width, width)
    elif rows == 2:
        _softmax_2(scores, offset, maxima, row, sums, row, acc, row * width, width)
    else:
        _softmax_1(scores, offset, maxima, row, sums, row, acc, row * width, width)
