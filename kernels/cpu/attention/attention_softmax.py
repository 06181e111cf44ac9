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
from kernels.cpu.vectors.numbers import LN2_HIGH, LN2_LOW, LOG2_E, exp, intrinsic
from kernels.cpu.vectors.vector_code import LANES, VECTOR, WORDS, element, load, multiply_add, shuffled, splat, store

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
            places = [_vectors(builder, builder.gep(start, [builder.mul(r, r.type(KEY_TILE))])) for r in rows]
            of_rows = [[load(builder, place) for place in of_row] for of_row in places]
            for r, largest in zip(rows, _over_all(builder, of_rows, _larger), strict=True):
                maximum, total = builder.gep(maxima, [r]), builder.gep(sums, [r])
                last = builder.load(maximum)
                with builder.if_then(builder.fcmp_ordered(">", largest, last)):
                    shrink = context.compile_internal(
                        builder, _shrink, types.float32(types.float32, types.float32), (last, largest)
                    )
                    builder.store(largest, maximum)
                    builder.store(builder.fmul(builder.load(total), shrink), total)
                    _scale(builder, builder.gep(acc, [builder.mul(r, width)]), width, shrink)
            for r, of_row in enumerate(places):
                maximum = splat(builder, builder.load(builder.gep(maxima, [rows[r]])))
                of_rows[r] = [_exp(builder, builder.fsub(load(builder, place), maximum)) for place in of_row]
                for weights, place in zip(of_rows[r], of_row, strict=True):
                    store(builder, weights, place)
            for r, more in zip(rows, _over_all(builder, of_rows, _sum), strict=True):
                total = builder.gep(sums, [r])
                builder.store(builder.fadd(builder.load(total), more), total)
            return context.get_dummy_value()

        number = types.intp
        return types.void(_FLAT, number, _FLAT, number, _FLAT, number, _FLAT, number, number), generate

    return softmax_rows


@intrinsic
def _fill_outside(typing_context: Any, scores: Any, offset: Any, start: Any, end: Any, value: Any) -> Any:
    """64 scores become `value`, all but start : end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, end = (_splat_word(builder, number) for number in arguments[2:4])
        value = splat(builder, arguments[4])
        for first, place in enumerate(_vectors(builder, element(context, builder, signature, arguments, 0))):
            keys = ir.Constant(WORDS, list(range(first * LANES, (first + 1) * LANES)))
            is_inside = builder.and_(builder.icmp_signed(">=", keys, start), builder.icmp_signed("<", keys, end))
            store(builder, builder.select(is_inside, load(builder, place), value), place)
        return context.get_dummy_value()

    number = types.int64
    return types.void(_FLAT, types.intp, number, number, types.float32), generate


@intrinsic
def multiply_by(typing_context: Any, numbers: Any, offset: Any, count: Any, factor: Any) -> Any:
    """`count` numbers from `offset` on, a multiple of 16, become `factor` times as much."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _scale(builder, element(context, builder, signature, arguments, 0), *arguments[2:])
        return context.get_dummy_value()

    return types.void(_FLAT, types.intp, types.int64, types.float32), generate


def _splat_word(builder: Any, number: Any) -> Any:
    """An int64 below 2^31 as a vector of words."""
    number = builder.bitcast(builder.trunc(number, ir.IntType(32)), ir.FloatType())
    return builder.bitcast(splat(builder, number), WORDS)


def _vectors(builder: Any, start: Any) -> list[Any]:
    return [builder.gep(start, [ir.Constant(ir.IntType(64), key)]) for key in range(0, KEY_TILE, LANES)]


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _over_all(builder: Any, of_rows: list[list[Any]], combine: Any) -> list[Any]:
    """What is left of each row's vectors, and then of its lanes, when two become one again and again; rows in turns, as
    each waits for its last result."""
    while len(of_rows[0]) > 1:
        of_rows = [
            [combine(builder, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)] for vectors in of_rows
        ]
    results, width = [vector for (vector,) in of_rows], LANES // 2
    while width:
        lanes = [lane ^ width for lane in range(LANES)]
        results = [combine(builder, vector, shuffled(builder, vector, vector, lanes)) for vector in results]
        width //= 2
    return [builder.extract_element(vector, ir.Constant(ir.IntType(32), 0)) for vector in results]


def _scale(builder: Any, start: Any, count: Any, factor: Any) -> None:
    factor = splat(builder, factor)
    with cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES)) as (first, _):
        place = builder.gep(start, [first])
        store(builder, builder.fmul(load(builder, place), factor), place)


def _shrink(last, largest):  # type: ignore[no-untyped-def]
    return exp(last - largest)


def _exp(builder: Any, x: Any) -> Any:
    def number(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return builder.call(multiply_add(builder), (a, b, c))

    inside = _larger(builder, x, number(_LOWEST))
    rint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.nearbyint.v{LANES}f32"
    )
    n = builder.call(rint, [builder.fmul(inside, number(float(LOG2_E)))])
    r = fma(n, number(-float(LN2_LOW)), fma(n, number(-float(LN2_HIGH)), inside))
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fma(p, r, number(coefficient))
    power = builder.fadd(fma(p, builder.fmul(r, r), r), number(1.0))
    exponent = builder.shl(builder.fptosi(n, WORDS), ir.Constant(WORDS, [23] * LANES))
    result = builder.bitcast(builder.add(builder.bitcast(power, WORDS), exponent), VECTOR)
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
