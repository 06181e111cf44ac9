"""The smallest logit that min-p, top-k and top-p keep, without a sort: a search over the order of floats.

    min-p   largest + temperature log(min_p)
    top-k   the largest number that k logits reach
    top-p   the largest number that logits of top_p of the weight reach, of what is left by the others

    logits   [R, vocab] f32, any stride between rows
    maxima   [R, chunks] f32, of every CHUNK_SIZE tokens
    listed   [R, chunks] i32, the chunks of a row that may hold the answer, `num_listed` [R] i32 of them
    cuts     [R] i64, the key of the smallest number that it can be

Three launches. The first sums all weights of rows that have top-p alone. The second searches the chunks' maxima: what k
of them reach, k logits reach, and what maxima of top_p of the weight reach, logits of that weight do. The third
searches the logits of the chunks whose maximum is that large: mostly a few dozen, kept near by the caches. Rows without
filters leave all three at once. Sums are of integers (`kernels.weights`), so a row's result is its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.checks import check_contiguous, check_rows
from kernels.float_order import first_shift, from_rising_key, largest_reached, rising_key
from kernels.reference_sampling import CHUNK_SIZE
from kernels.variant import Variant
from kernels.weights import halvings, is_finite, min_p_bound, new_segment_weights, num_segments, weigh, weigh_segment

_TILE = 32  # chunks of the list at a time


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
def _total_weights_kernel(  # type: ignore[no-untyped-def]
    weights,
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
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature_of = tl.load(largest + row), tl.load(temperature + row)
    is_wanted = (tl.load(top_p + row) < 1) & (_is_limited(tl.load(top_k + row), vocab_size) == 0)
    if is_wanted & is_finite(best) & (temperature_of > 0):
        bound = min_p_bound(best, temperature_of, tl.load(min_p + row))
        row_logits, row_maxima = logits + row * logits_stride, maxima + row * num_chunks
        found = weigh_segment(
            row_logits, row_maxima, vocab_size, num_chunks, segment, best, bound, halvings(temperature_of)
        )
        tl.store(weights + row * num_segments + segment, tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit
def _list_chunks_kernel(  # type: ignore[no-untyped-def]
    smallest,
    listed,
    num_listed,
    cuts,
    weights,
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
        low = tl.maximum(lowest, tl.min(tl.where(is_chunk, keys, high)))
        cut = largest_reached(keys, measures, low, high, goal)
        cut = tl.where(tl.sum(tl.where(keys >= cut, measures, 0)) >= goal, cut, lowest)
        is_listed = is_chunk & (keys >= cut)
        place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(listed + row * num_chunks + place, chunks, is_listed)
        tl.store(num_listed + row, tl.sum(is_listed.to(tl.int32)))
        tl.store(cuts + row, cut)


@triton.jit
def _listed_keys(logits, listed, count, first, vocab_size, CHUNK_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of some listed chunks, and their keys: -1 where there is none."""
    entries = first + tl.arange(0, TILE)
    chunks = tl.load(listed + entries, entries < count, 0)
    tokens = chunks[:, None] * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, :]
    mask = (entries < count)[:, None] & (tokens < vocab_size)
    x = tl.load(logits + tokens, mask, float("-inf"))
    return x, tl.where(mask, rising_key(x), -1)


@triton.jit
def _weight_above(logits, listed, count, vocab_size, low, best, halving, CHUNK_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the listed logits whose key is at least `low`."""
    total = tl.zeros((TILE, CHUNK_SIZE), tl.int64)
    first = 0
    while first < count:
        x, keys = _listed_keys(logits, listed, count, first, vocab_size, CHUNK_SIZE, TILE)
        total += tl.where(keys >= low, weigh(x, best, halving), 0)
        first += TILE
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _largest_listed(  # type: ignore[no-untyped-def]
    logits,
    listed,
    count,
    vocab_size,
    low,
    high,
    goal,
    best,
    halving,
    IS_WEIGHED: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """`largest_reached` of the listed logits, by their weights or by their number."""
    shift = first_shift(low, high)
    found = (high >> (shift + 2)) << (shift + 2)
    while shift >= 0:
        step = tl.full((), 1, tl.int64) << shift
        above1 = tl.zeros((TILE, CHUNK_SIZE), tl.int64 if IS_WEIGHED else tl.int32)
        above2, above3 = above1, above1
        first = 0
        while first < count:
            x, keys = _listed_keys(logits, listed, count, first, vocab_size, CHUNK_SIZE, TILE)
            measures = weigh(x, best, halving) if IS_WEIGHED else 1
            above1 += tl.where(keys >= found + step, measures, 0)
            above2 += tl.where(keys >= found + 2 * step, measures, 0)
            above3 += tl.where(keys >= found + 3 * step, measures, 0)
            first += TILE
        digit = (tl.sum(tl.sum(above1, axis=1), axis=0) >= goal).to(tl.int64)
        digit += (tl.sum(tl.sum(above2, axis=1), axis=0) >= goal).to(tl.int64)
        digit += (tl.sum(tl.sum(above3, axis=1), axis=0) >= goal).to(tl.int64)
        found += digit << shift
        shift -= 2
    return tl.maximum(found, low)


@triton.jit
def _search_listed_kernel(  # type: ignore[no-untyped-def]
    smallest,
    listed,
    num_listed,
    cuts,
    weights,
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    vocab_size,
    num_chunks,
    num_segments,
    logits_stride,
    SEGMENTS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_listed + row)
    if count > 0:
        x, entries = logits + row * logits_stride, listed + row * num_chunks
        best, halving = tl.load(largest + row), halvings(tl.load(temperature + row))
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        low, high = tl.load(cuts + row), rising_key(best)
        if _is_limited(k, vocab_size):
            low = _largest_listed(x, entries, count, vocab_size, low, high, k, best, halving, False, CHUNK_SIZE, TILE)
        if p < 1:
            if _is_limited(k, vocab_size):
                total = _weight_above(x, entries, count, vocab_size, low, best, halving, CHUNK_SIZE, TILE)
            else:
                segments = tl.arange(0, SEGMENTS)
                total = tl.sum(tl.load(weights + row * num_segments + segments, segments < num_segments, 0))
            low = _largest_listed(
                x, entries, count, vocab_size, low, high, _share(p, total), best, halving, True, CHUNK_SIZE, TILE
            )
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
    """See `kernels.reference.kept_range`; weights are those of `kernels.weights`, so a token at the border of `top_p`
    may be kept that float64 would not, or the other way round. Raises ValueError for what does not fit."""
    check_rows("kept_range", logits=logits)
    (count, vocab_size), num_chunks = logits.shape, triton.cdiv(logits.shape[1], CHUNK_SIZE)
    check_contiguous("kept_range", "maxima", maxima, (count, num_chunks), logits)
    columns = {"smallest": smallest, "largest": largest, "temperature": temperature}
    for name, column in (columns | {"min_p": min_p, "top_k": top_k, "top_p": top_p}).items():
        check_contiguous("kept_range", name, column, (count,), logits)
    if not count:
        return
    segments, (chunks, num_warps) = num_segments(vocab_size), _chunk_tile(num_chunks)
    weights = new_segment_weights(logits)
    listed = torch.empty(count, num_chunks, dtype=torch.int32, device=logits.device)
    num_listed, cuts = listed.new_empty(count), weights.new_empty(count)
    sizes, filters = (vocab_size, num_chunks, segments), (temperature, min_p, top_k, top_p)
    _total_weights_kernel[(count, segments)](weights, logits, maxima, largest, *filters, *sizes, logits.stride(0))
    _list_chunks_kernel[(count,)](
        smallest,
        listed,
        num_listed,
        cuts,
        weights,
        maxima,
        largest,
        *filters,
        *sizes,
        CHUNKS=chunks,
        SEGMENTS=triton.next_power_of_2(segments),
        num_warps=num_warps,
    )
    _search_listed_kernel[(count,)](
        smallest,
        listed,
        num_listed,
        cuts,
        weights,
        logits,
        largest,
        temperature,
        top_k,
        top_p,
        *sizes,
        logits.stride(0),
        SEGMENTS=triton.next_power_of_2(segments),
        CHUNK_SIZE=CHUNK_SIZE,
        TILE=_TILE,
        num_warps=8,
    )


def _chunk_tile(num_chunks: int) -> tuple[int, int]:
    """The power of 2 that holds a row's chunks, and warps for it: 16 maxima a thread."""
    tile = triton.next_power_of_2(num_chunks)
    return tile, min(max(tile // 512, 4), 16)


def variants() -> Iterator[Variant]:
    """Vocabularies of 32,000, 128,256 and 262,144 tokens."""
    pointers = {"weights": "*i64", "logits": "*fp32", "maxima": "*fp32", "largest": "*fp32", "temperature": "*fp32"}
    pointers |= {"min_p": "*fp32", "top_k": "*i64", "top_p": "*fp32", "smallest": "*fp32", "listed": "*i32"}
    pointers |= {"num_listed": "*i32", "cuts": "*i64"}
    sizes = dict.fromkeys(["vocab_size", "num_chunks", "num_segments", "logits_stride"], "i32")

    def signature(kernel: object) -> dict[str, str]:
        return {name: (pointers | sizes)[name] for name in kernel.arg_names if name in pointers | sizes}  # type: ignore[attr-defined]

    def variant(name: str, kernel: object, constants: dict[str, object], num_warps: int) -> Variant:
        types = signature(kernel)
        aligned = (*(each for each in types if each in pointers), "vocab_size", "logits_stride")
        return Variant(
            f"kept_range {name}",
            kernel,
            types,
            constants,
            num_warps=num_warps,
            divisible_by_16=tuple(each for each in aligned if each in types),
            may_spill=False,
        )

    yield variant("total weights", _total_weights_kernel, {}, 4)
    for vocab_size in (32_000, 128_256, 262_144):
        chunks, num_warps = _chunk_tile(triton.cdiv(vocab_size, CHUNK_SIZE))
        segments = triton.next_power_of_2(num_segments(vocab_size))
        yield variant(
            f"list chunks of {vocab_size}", _list_chunks_kernel, {"CHUNKS": chunks, "SEGMENTS": segments}, num_warps
        )
        yield variant(
            f"search of {vocab_size}",
            _search_listed_kernel,
            {"SEGMENTS": segments, "CHUNK_SIZE": CHUNK_SIZE, "TILE": _TILE},
            8,
        )
