"""The softmax of a row of 64 scores in registers, as LLVM vector code; 16 numbers at a time.

    e^x = 2^n (1 + r + r^2 P(r)),   n = round(x log2 e),   r = x - n ln 2

with P as in Cephes `expf`: within 1 ulp for x <= 0, 0 below -87, and NaN of NaN, so that a broken key does not just
disappear. 2^n is added to the exponent's bits. Maxima and sums are taken over vectors and then over lanes, in one order
on every machine. Three rows take 41 ns on a Zen 5 core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from kernels.cpu.attention_tiles import KEY_TILE
from kernels.cpu.numbers import LN2_HIGH, LN2_LOW, LOG2_E, exp, intrinsic
from kernels.cpu.vector_code import LANES, VECTOR, WORDS, element, load, multiply_add, shuffled, splat, store

NO_MAXIMUM = np.float32(-1e30)  # of a row that has met no key: finite, as what is subtracted from scores

_HIDDEN = np.float32(-np.inf)  # a score whose weight is zero

_LOWEST = -87.0  # e to less than this is no normal float32
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_FLAT = types.Array(types.float32, 1, "C")


@intrinsic
def largest_of_tile(typing_context: Any, scores: Any, offset: Any) -> Any:
    """The largest of 64 scores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = _vectors(builder, element(context, builder, signature, arguments, 0))
        return _over_all(builder, [load(builder, place) for place in vectors], _larger)

    return types.float32(_FLAT, types.intp), generate


@intrinsic
def to_weights(typing_context: Any, scores: Any, offset: Any, maximum: Any) -> Any:
    """Turns 64 scores, none above `maximum`, to e^(score - maximum) in place; returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = _vectors(builder, element(context, builder, signature, arguments, 0))
        maximum = splat(builder, arguments[2])
        weights = [_exp(builder, builder.fsub(load(builder, place), maximum)) for place in places]
        for weight, place in zip(weights, places, strict=True):
            store(builder, weight, place)
        return _over_all(builder, weights, lambda builder, a, b: builder.fadd(a, b))

    return types.float32(_FLAT, types.intp, types.float32), generate


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
        start, factor = element(context, builder, signature, arguments, 0), splat(builder, arguments[3])
        count = arguments[2]
        with cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES)) as (first, _):
            place = builder.gep(start, [first])
            store(builder, builder.fmul(load(builder, place), factor), place)
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


def _over_all(builder: Any, vectors: list[Any], combine: Any) -> Any:
    while len(vectors) > 1:
        vectors = [combine(builder, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    (vector,), width = vectors, LANES // 2
    while width:
        lanes = [lane ^ width for lane in range(LANES)]
        vector = combine(builder, vector, shuffled(builder, vector, vector, lanes))
        width //= 2
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


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


@njit(nogil=True, fastmath={"contract"})
def _bias(scores, offset, distance, cap, slope):  # type: ignore[no-untyped-def]
    """Soft cap and ALiBi; `distance` is the first key's position minus the query's."""
    for j in range(KEY_TILE):
        score = scores[offset + j]
        if cap > np.float32(0.0):
            score = cap * np.tanh(score / cap)
        scores[offset + j] = score + slope * np.float32(distance + j)


@njit(nogil=True)
def soften(scores, offset, distance, slope, window, cap, maxima, sums, row, acc, width):  # type: ignore[no-untyped-def]
    """The 64 scores of a row, from `offset` on, become its weights: 0 for keys after its token, or before its window.

    `distance` is the first key's position minus the token's. The row's maximum and sum go on in `maxima` and `sums`,
    and what it has added up so far, acc[row * width :], is scaled to a new maximum. Whole arrays and places in them, as
    the references of a slice are counted: a prompt of 1,500 tokens took a fifth longer.
    """
    visible_start = max(0, 1 - window - distance) if window > 0 else 0
    visible_end = max(0, min(KEY_TILE, 1 - distance))
    if visible_start >= visible_end:
        _fill_outside(scores, offset, 0, 0, np.float32(0.0))
        return
    if cap > np.float32(0.0) or slope != np.float32(0.0):
        _bias(scores, offset, distance, cap, slope)
    if visible_end - visible_start < KEY_TILE:
        _fill_outside(scores, offset, visible_start, visible_end, _HIDDEN)
    largest = largest_of_tile(scores, offset)
    if largest > maxima[row]:
        shrink = exp(maxima[row] - largest)
        maxima[row] = largest
        sums[row] *= shrink
        multiply_by(acc, row * width, width, shrink)
    sums[row] += to_weights(scores, offset, maxima[row])
