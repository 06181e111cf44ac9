"""The smallest logit that min-p, top-k and top-p keep, without a sort: a search over the order of floats.

    min-p   largest + temperature log(min_p)
    top-k   the largest number that k logits reach
    top-p   the largest number that logits of top_p of the weight reach, of what is left by the others

    logits  [R, vocab] f32, any stride between rows
    maxima  [R, chunks] f32, of every CHUNK_SIZE tokens

Four launches, which rows without filters leave at once; each narrows the keys that the answer may have:

    weigh     rows with top-p alone: the weight of each segment, and of what lies 1, 2, ... nats below the largest
    list      lists the chunks that may hold the answer. What k of the maxima reach, k logits reach; what maxima of
              top_p of the weight reach, logits of that weight do. Where all maxima together have less than that, the
              distribution is flat, and the nats between which the weight passes top_p are the bounds
    gather    the logits of these chunks that lie between the bounds, next to each other, and the weight above them
    search    among what was gathered, mostly a few dozen logits; in the whole row where it was too much

Sums that decide are of integers (`weights`), so a row's result is its own. Those of a number of nats are of
floats, but `gather` checks the bounds that come of them, and takes wider ones where they do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.sampling.float_order import from_rising_key, largest_reached, largest_stored, rising_key, weight_stored
from kernels.gpu.sampling.weights import (
    ONE,
    halvings,
    is_finite,
    min_p_bound,
    new_segment_weights,
    num_segments,
    weigh,
    weigh_segment,
)
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant
from kernels.oracles.reference_sampling import CHUNK_SIZE

_TILE = 32  # chunks of the list at a time
_NATS = 16  # distances from the largest logit, of 1 to so many times the temperature
_MOST_GATHERED = 8192  # logits a row
_BLOCK = 1024  # of them at a time


@triton.jit
def _is_limited(top_k, vocab_size):  # type: ignore[no-untyped-def]
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _share(top_p, total):  # type: ignore[no-untyped-def]
    """The smallest weight that is no less than `top_p` of `total`, and not nothing."""
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    floor = exact.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _weigh_kernel(  # type: ignore[no-untyped-def]
    weights,  # i64[R, segments]
    above,  # f32[R, segments, NATS], weight of what is no more than 1, 2, ... nats below the largest
    logits,
    maxima,
    largest,
    temperature,
    min_p,
    top_k,
    top_p,
    vocab_size,
    num_chunks,
    num_segments,
    logits_stride,
    ONE: tl.constexpr,
    NATS: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
    is_wanted = (tl.load(top_p + row) < 1) & (_is_limited(tl.load(top_k + row), vocab_size) == 0)
    if is_wanted & is_finite(best) & (temperature_of > 0):
        bound, halving = min_p_bound(best, temperature_of, tl.load(min_p + row)), halvings(temperature_of)
        row_logits, row_maxima = logits + row * logits_stride, maxima + row * num_chunks
        found = weigh_segment(row_logits, row_maxima, vocab_size, num_chunks, segment, best, bound, halving)
        place = row * num_segments + segment
        tl.store(weights + place, tl.sum(tl.sum(found, axis=1), axis=0))
        share = found.to(tl.float32) / ONE
        for nats in tl.static_range(1, NATS + 1):
            of_near = tl.where(share >= tl.exp(tl.full((), -nats, tl.float32)), share, 0.0)
            tl.store(above + place * NATS + nats - 1, tl.sum(tl.sum(of_near, axis=1), axis=0))


@triton.jit
def _list_kernel(  # type: ignore[no-untyped-def]
    smallest,
    listed,  # i32[R, chunks]
    num_listed,  # i32[R]
    lows,  # i64[R], keys
    highs,  # i64[R], keys
    weights,
    above,
    maxima,
    largest,
    temperature,
    min_p,
    top_k,
    top_p,
    vocab_size,
    num_chunks,
    num_segments,
    CHUNKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ONE: tl.constexpr,
    NATS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    is_drawn = is_finite(best) & (temperature_of > 0)
    bound = min_p_bound(best, tl.where(is_drawn, temperature_of, 0.0), tl.load(min_p + row))
    tl.store(smallest + row, tl.where(is_drawn, bound, float("-inf")))
    tl.store(num_listed + row, 0)
    if is_drawn & (_is_limited(k, vocab_size) | (p < 1)):
        chunks = tl.arange(0, CHUNKS)
        is_chunk = chunks < num_chunks
        of_chunks = tl.load(maxima + row * num_chunks + chunks, is_chunk, float("-inf"))
        keys, high, lowest = rising_key(of_chunks), rising_key(best), rising_key(bound)
        measures, goal = is_chunk.to(tl.int64), k
        if not _is_limited(k, vocab_size):
            segments = tl.arange(0, SEGMENTS)
            of_segments = tl.load(weights + row * num_segments + segments, segments < num_segments, 0)
            measures, goal = weigh(of_chunks, best, halvings(temperature_of)), _share(p, tl.sum(of_segments))
        low = largest_reached(keys, measures, tl.maximum(lowest, tl.min(tl.where(is_chunk, keys, high))), high, goal)
        if tl.sum(tl.where(keys >= low, measures, 0)) < goal:
            low = lowest
            if not _is_limited(k, vocab_size):
                nats = tl.arange(0, NATS)
                segments = tl.arange(0, SEGMENTS)
                places = (row * num_segments + segments)[:, None] * NATS + nats[None, :]
                near = tl.sum(tl.load(above + places, (segments < num_segments)[:, None], 0.0), axis=0)
                num_short = tl.sum((near < goal.to(tl.float32) / ONE).to(tl.int32))
                if num_short > 0:
                    high = tl.minimum(high, rising_key(best - num_short * temperature_of))
                if num_short < NATS:
                    low = tl.minimum(high, tl.maximum(low, rising_key(best - (num_short + 1) * temperature_of)))
        is_listed = is_chunk & (keys >= low)
        place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(listed + row * num_chunks + place, chunks, is_listed)
        tl.store(num_listed + row, tl.sum(is_listed.to(tl.int32)))
        tl.store(lows + row, low)
        tl.store(highs + row, high)


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    gathered,  # f32[R, MOST]
    num_gathered,  # i32[R]; more than MOST: it was too much, the row itself is to be searched
    weights_above,  # i64[R], of logits above what was gathered
    lows,
    highs,
    listed,
    num_listed,
    weights,
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_chunks,
    num_segments,
    logits_stride,
    SEGMENTS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_listed + row)
    if count > 0:
        best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
        low, high, halving = tl.load(lows + row), tl.load(highs + row), halvings(temperature_of)
        of_above, of_inside = tl.zeros((TILE, CHUNK_SIZE), tl.int64), tl.zeros((TILE, CHUNK_SIZE), tl.int64)
        num, first = 0, 0
        while first < count:
            entries = first + tl.arange(0, TILE)
            chunks = tl.load(listed + row * num_chunks + entries, entries < count, 0)
            tokens = chunks[:, None] * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, :]
            mask = (entries < count)[:, None] & (tokens < vocab_size)
            x = tl.load(logits + row * logits_stride + tokens, mask, float("-inf"))
            keys, found = rising_key(x), weigh(x, best, halving)
            is_inside = mask & (keys >= low) & (keys <= high)
            of_above += tl.where(keys > high, found, 0)
            of_inside += tl.where(is_inside, found, 0)
            num_of_chunks = tl.sum(is_inside.to(tl.int32), axis=1)
            starts = num + tl.cumsum(num_of_chunks, axis=0) - num_of_chunks
            place = starts[:, None] + tl.cumsum(is_inside.to(tl.int32), axis=1) - 1
            tl.store(gathered + row * MOST + place, x, is_inside & (place < MOST))
            num += tl.sum(num_of_chunks)
            first += TILE
        weight_above = tl.sum(tl.sum(of_above, axis=1), axis=0)
        if not _is_limited(tl.load(top_k + row), vocab_size):
            segments = tl.arange(0, SEGMENTS)
            total = tl.sum(tl.load(weights + row * num_segments + segments, segments < num_segments, 0))
            goal, reached = (
                _share(tl.load(top_p + row), total),
                weight_above + tl.sum(tl.sum(of_inside, axis=1), axis=0),
            )
            if (weight_above >= goal) | (reached < goal):  # the bounds do not hold
                num = MOST + 1
                tl.store(lows + row, rising_key(min_p_bound(best, temperature_of, tl.load(min_p + row))))
                tl.store(highs + row, rising_key(best))
        tl.store(num_gathered + row, num)
        tl.store(weights_above + row, weight_above)


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    smallest,
    gathered,
    num_gathered,
    weights_above,
    lows,
    highs,
    num_listed,
    weights,
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    vocab_size,
    num_segments,
    logits_stride,
    SEGMENTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(num_listed + row) > 0:
        best, halving = tl.load(largest + row), halvings(tl.load(temperature + row))
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        low, high = tl.load(lows + row), tl.load(highs + row)
        x, count, weight_above = gathered + row * MOST, tl.load(num_gathered + row), tl.load(weights_above + row)
        if count > MOST:
            x, count, weight_above = logits + row * logits_stride, vocab_size, tl.full((), 0, tl.int64)
        if _is_limited(k, vocab_size):
            low = largest_stored(x, count, low, high, k, best, halving, False, BLOCK)
        if p < 1:
            if _is_limited(k, vocab_size):
                goal = _share(p, weight_stored(x, count, low, best, halving, BLOCK))
            else:
                segments = tl.arange(0, SEGMENTS)
                total = tl.sum(tl.load(weights + row * num_segments + segments, segments < num_segments, 0))
                goal = _share(p, total) - weight_above
            low = largest_stored(x, count, low, high, goal, best, halving, True, BLOCK)
        tl.store(smallest + row, tl.maximum(tl.load(smallest + row), from_rising_key(low)))


def kept_range(
    smallest: torch.Tensor,
    logits: torch.Tensor,
    maxima: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """See `reference.kept_range`; weights are those of `weights`, so a token at the border of `top_p`
    may be kept that float64 would not, or the other way round. Raises ValueError for what does not fit."""
    check_rows("kept_range", logits=logits)
    (count, vocab_size), num_chunks = logits.shape, cdiv(logits.shape[1], CHUNK_SIZE)
    check_contiguous("kept_range", "maxima", maxima, (count, num_chunks), logits)
    columns = {"smallest": smallest, "largest": largest, "temperature": temperature}
    for name, column in (columns | {"min_p": min_p, "top_k": top_k, "top_p": top_p}).items():
        check_contiguous("kept_range", name, column, (count,), logits)
    if not count:
        return
    num, (chunks, num_warps) = num_segments(vocab_size), _chunk_tile(num_chunks)
    segments, stride = next_power_of_2(num), logits.stride(0)
    weights = new_segment_weights(logits)
    above, gathered = logits.new_empty(count, num, _NATS), logits.new_empty(count, _MOST_GATHERED)
    listed = torch.empty(count, num_chunks, dtype=torch.int32, device=logits.device)
    # Each by itself: where an address is no multiple of 16, as that of a part may be, kernels are compiled once more.
    num_listed, num_gathered = listed.new_empty(count), listed.new_empty(count)
    lows, highs, weights_above = weights.new_empty(count), weights.new_empty(count), weights.new_empty(count)
    of_rows, filters, sizes = (maxima, largest, temperature), (min_p, top_k, top_p), (vocab_size, num_chunks, num)
    _weigh_kernel[(count, num)](weights, above, logits, *of_rows, *filters, *sizes, stride, ONE=ONE, NATS=_NATS)
    _list_kernel[(count,)](
        smallest,
        listed,
        num_listed,
        lows,
        highs,
        weights,
        above,
        *of_rows,
        *filters,
        *sizes,
        CHUNKS=chunks,
        SEGMENTS=segments,
        ONE=ONE,
        NATS=_NATS,
        num_warps=num_warps,
    )
    _gather_kernel[(count,)](
        gathered,
        num_gathered,
        weights_above,
        lows,
        highs,
        listed,
        num_listed,
        weights,
        logits,
        largest,
        temperature,
        top_k,
        top_p,
        min_p,
        *sizes,
        stride,
        SEGMENTS=segments,
        CHUNK_SIZE=CHUNK_SIZE,
        TILE=_TILE,
        MOST=_MOST_GATHERED,
        num_warps=8,
    )
    _search_kernel[(count,)](
        smallest,
        gathered,
        num_gathered,
        weights_above,
        lows,
        highs,
        num_listed,
        weights,
        logits,
        largest,
        temperature,
        top_k,
        top_p,
        vocab_size,
        num,
        stride,
        SEGMENTS=segments,
        MOST=_MOST_GATHERED,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _chunk_tile(num_chunks: int) -> tuple[int, int]:
    """The power of 2 that holds a row's chunks, and warps for it: 8 maxima a thread; with 16 some compilers spill."""
    tile = next_power_of_2(num_chunks)
    return tile, min(max(tile // 256, 4), 16)


def variants() -> Iterator[Variant]:
    """Vocabularies of 32,000, 128,256 and 262,144 tokens."""
    pointers = dict.fromkeys(["smallest", "above", "logits", "maxima", "largest", "temperature", "gathered"], "*fp32")
    pointers |= dict.fromkeys(["min_p", "top_p"], "*fp32")
    pointers |= dict.fromkeys(["weights", "weights_above", "lows", "highs", "top_k"], "*i64")
    pointers |= dict.fromkeys(["listed", "num_listed", "num_gathered"], "*i32")
    types = pointers | dict.fromkeys(["vocab_size", "num_chunks", "num_segments", "logits_stride"], "i32")
    values: dict[str, object] = {"ONE": ONE, "NATS": _NATS, "CHUNK_SIZE": CHUNK_SIZE, "TILE": _TILE}
    values |= {"MOST": _MOST_GATHERED, "BLOCK": _BLOCK}

    def variant(name: str, kernel: Any, num_warps: int) -> Variant:
        signature = {each: types[each] for each in kernel.arg_names if each in types}
        return Variant(
            f"kept_range {name}",
            kernel,
            signature,
            {each: values[each] for each in kernel.arg_names if each in values},
            num_warps=num_warps,
            divisible_by_16=tuple(each for each in (*pointers, "vocab_size", "logits_stride") if each in signature),
            may_spill=False,
            may_spill_on=(120,) if kernel in (_list_kernel, _gather_kernel) else (),
        )

    yield variant("weigh", _weigh_kernel, 4)
    for vocab_size in (32_000, 128_256, 262_144):
        values["CHUNKS"], num_warps = _chunk_tile(cdiv(vocab_size, CHUNK_SIZE))
        values["SEGMENTS"] = next_power_of_2(num_segments(vocab_size))
        yield variant(f"list of {vocab_size}", _list_kernel, num_warps)
        yield variant(f"gather of {vocab_size}", _gather_kernel, 8)
        yield variant(f"search of {vocab_size}", _search_kernel, 8)
