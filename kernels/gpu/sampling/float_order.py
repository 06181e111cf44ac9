"""float32 numbers in the order of integers, inside Triton kernels, and a search over that order that needs no sort.

    key = bits + 2^31 of a positive number, ~bits of a negative one: rises from 0 to 2^32 - 1 as the number rises

The k-th largest of some numbers is the largest key that at least k of them reach; where a filter keeps a share of the
weight, it is the largest key that numbers of that weight reach. Both are found two bits at a time, from the first in
which the numbers differ at all: at most 16 passes over them. Integers add up alike in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.weights import weigh


@triton.jit
def rising_key(x):  # type: ignore[no-untyped-def]
    """int64 in [0, 2^32) for float32 x that is not NaN; 0.0 and -0.0, which are equal, are neighbours."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000


@triton.jit
def from_rising_key(key):  # type: ignore[no-untyped-def]
    """The float32 number whose key this is."""
    signed = (key - 0x80000000).to(tl.int32)
    return tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed).to(tl.float32, bitcast=True)


@triton.jit
def first_shift(low, high):  # type: ignore[no-untyped-def]
    """Where a search between two keys begins: the place of the two highest bits that may differ."""
    shift = 30
    while (shift > 0) & ((low >> shift) == (high >> shift)):
        shift -= 2
    return shift


@triton.jit
def largest_reached(keys, measures, low, high, goal):  # type: ignore[no-untyped-def]
    """The largest key in [low, high] such that the `measures` int64 of keys >= it sum to `goal`; `low` if none does."""
    shift = first_shift(low, high)
    found = (high >> (shift + 2)) << (shift + 2)
    while shift >= 0:
        digit = tl.full((), 0, tl.int64)
        for candidate in tl.static_range(1, 4):
            pivot = found + (tl.full((), candidate, tl.int64) << shift)
            digit += (tl.sum(tl.where(keys >= pivot, measures, 0)) >= goal).to(tl.int64)
        found += digit << shift
        shift -= 2
    return tl.maximum(found, low)


@triton.jit
def _keys_stored(x, count, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK of the `count` numbers at `x` and their keys, -1 past the last."""
    i = first + tl.arange(0, BLOCK)
    values = tl.load(x + i, i < count, float("-inf"))
    return values, tl.where(i < count, rising_key(values), -1)


@triton.jit
def weight_stored(x, count, low, largest, halvings, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of those of the `count` logits at `x` whose key is at least `low`."""
    total = tl.zeros((BLOCK,), tl.int64)
    first = 0
    while first < count:
        values, keys = _keys_stored(x, count, first, BLOCK)
        total += tl.where(keys >= low, weigh(values, largest, halvings), 0)
        first += BLOCK
    return tl.sum(total)


@triton.jit
def largest_stored(  # type: ignore[no-untyped-def]
    x, count, low, high, goal, largest, halvings, IS_WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    """`largest_reached` of the `count` logits at `x`, by their weights or by their number."""
    shift = first_shift(low, high)
    found = (high >> (shift + 2)) << (shift + 2)
    while shift >= 0:
        step = tl.full((), 1, tl.int64) << shift
        above1 = tl.zeros((BLOCK,), tl.int64 if IS_WEIGHED else tl.int32)
        above2, above3 = above1, above1
        first = 0
        while first < count:
            values, keys = _keys_stored(x, count, first, BLOCK)
            measures = weigh(values, largest, halvings) if IS_WEIGHED else 1
            above1 += tl.where(keys >= found + step, measures, 0)
            above2 += tl.where(keys >= found + 2 * step, measures, 0)
            above3 += tl.where(keys >= found + 3 * step, measures, 0)
            first += BLOCK
        digit = (tl.sum(above1) >= goal).to(tl.int64)
        digit += (tl.sum(above2) >= goal).to(tl.int64) + (tl.sum(above3) >= goal).to(tl.int64)
        found += digit << shift
        shift -= 2
    return tl.maximum(found, low)
