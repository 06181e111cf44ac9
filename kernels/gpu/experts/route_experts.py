"""Tokens to their experts: the largest shares of a softmax, and rows sorted by experts, in three launches.

    shares = top k of softmax(logits),  place of (token, choice) = rows of experts before + rows of tokens before

    logits [T, num_experts]        rows at any stride
    shares f32[T, k], places i32[T, k], rows i64[T * k], starts i32[own + 1]    as the oracle has them
    choices i32[T, k], counts i32[tiles + 1, num_experts] between the launches: how many tokens of each tile chose an
    expert, then how many of the tiles before it did, and at last of all

Source: Shazeer et al. 2017 (arXiv:1701.06538). A token chooses an expert at most once, so that a tile's choices are a
matrix of zeros and ones, [tokens, experts]: its sums over tokens count rows, and sums up to a token number them. The
second kernel adds up counts over tiles, expert by expert: if each program of the third did so for itself, what is read
would grow with the square of tokens, to 8 GB a layer for a prompt of 8,192 and 512 experts. No program waits for
another, and nothing depends on the order in which they run; a token's shares depend on its logits alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ELEMENTS = 2048  # of a tile, tokens by experts: 8 a thread
_MAX_TOKENS = 32  # of a tile
_REGISTERS = 255  # of a thread, as many as there are: left to itself, ptxas spills a few for more threads at once
_SUMMED_TILES, _SUMMED_EXPERTS = 64, 32  # whose counts a program adds up at once


@triton.jit(do_not_specialize=["count"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    shares,
    choices,
    counts,
    logits,
    count,
    stride,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert, choice = tl.arange(0, PADDED_EXPERTS)[None, :], tl.arange(0, PADDED_CHOSEN)[None, :]
    inside = (token < count)[:, None]
    is_free = inside & (expert < EXPERTS)
    x = tl.load(logits + token.to(tl.int64)[:, None] * stride + expert, is_free, -float("inf")).to(tl.float32)
    largest = tl.max(tl.where(x == x, x, -float("inf")), 1)
    likely = tl.exp(x - tl.where(inside, largest[:, None], 0.0))
    total = tl.where(token < count, tl.sum(tl.where(is_free, likely, 0.0), 1), 1.0)
    x = tl.where(x == x, x, -float("inf"))
    all_shares = tl.zeros((TOKENS, PADDED_CHOSEN), tl.float32)
    all_choices = tl.zeros((TOKENS, PADDED_CHOSEN), tl.int32)
    for number in tl.static_range(CHOSEN):
        best = tl.max(tl.where(is_free, x, -float("inf")), 1)[:, None]
        chosen = tl.min(tl.where(is_free & (x == best), expert, PADDED_EXPERTS), 1)[:, None]
        is_chosen = expert == chosen
        share = tl.sum(tl.where(is_chosen, likely, 0.0), 1) / total
        all_shares = tl.where(choice == number, share[:, None], all_shares)
        all_choices = tl.where(choice == number, chosen, all_choices)
        is_free = is_free & ~is_chosen
    if IS_NORMALIZED:
        all_shares = all_shares / tl.where(inside, tl.sum(all_shares, 1)[:, None], 1.0)
    place, mask = token[:, None] * CHOSEN + choice, inside & (choice < CHOSEN)
    tl.store(shares + place, all_shares, mask)
    tl.store(choices + place, all_choices, mask)
    is_chosen = inside & (expert < EXPERTS) & ~is_free
    of_tile = counts + tl.program_id(0) * EXPERTS + tl.arange(0, PADDED_EXPERTS)
    tl.store(of_tile, tl.sum(is_chosen.to(tl.int32), 0), tl.arange(0, PADDED_EXPERTS) < EXPERTS)


@triton.jit(do_not_specialize=["tiles"])
def _sum_counts_kernel(counts, tiles, EXPERTS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)[:, None]
        places, mask = counts + tile * EXPERTS + expert, (tile < tiles) & (expert < EXPERTS)
        found = tl.load(places, mask, 0)
        tl.store(places, before[None, :] + tl.cumsum(found, 0) - found, mask)
        before += tl.sum(found, 0)
    tl.store(counts + tiles * EXPERTS + expert, before[None, :], expert < EXPERTS)


@triton.jit(do_not_specialize=["count", "first_expert"])
def _place_kernel(  # type: ignore[no-untyped-def]
    places,
    rows,
    starts,
    choices,
    counts,
    count,
    first_expert,
    OWN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, PADDED_EXPERTS)
    is_own = (expert >= first_expert) & (expert < first_expert + OWN)
    before = tl.load(counts + tile * EXPERTS + expert, is_own, 0)
    total = tl.load(counts + tiles * EXPERTS + expert, is_own, 0)
    ends = tl.cumsum(total, 0)
    if tile == 0:
        tl.store(starts + expert - first_expert, ends - total, is_own)
        tl.store(starts + OWN, tl.sum(total, 0))
    token = tile * TOKENS + tl.arange(0, TOKENS)[:, None]
    # The number of each token's choice of an expert, counted from 1: a token chooses each once.
    numbers = tl.zeros((TOKENS, PADDED_EXPERTS), tl.int32)
    for choice in tl.static_range(CHOSEN):
        chosen = tl.load(choices + token * CHOSEN + choice, token < count, -1)
        numbers = tl.where(chosen == expert[None, :], choice + 1, numbers)
    is_here = numbers > 0
    place = (ends - total + before)[None, :] + tl.cumsum(is_here.to(tl.int32), 0) - 1
    tl.store(places + token * CHOSEN + numbers - 1, tl.where(is_own[None, :], place, -1), is_here)
    tl.store(rows + place, (token + tl.zeros_like(place)).to(tl.int64), is_here & is_own[None, :])


def route_experts(
    shares: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    logits: torch.Tensor,
    *,
    first_expert: int = 0,
    is_normalized: bool,
) -> None:
    """See `reference.route_experts`; waits for nothing. Raises ValueError where a shape or type does not fit."""
    if not logits.shape[0]:
        starts.zero_()
        return
    bound = _bound((shares, places, rows, starts, logits), first_expert, is_normalized)
    choices, counts = torch.empty_like(places), starts.new_empty(bound.num_counts)
    bound.choose(shares, choices, counts, logits)
    bound.sum_counts(counts)
    bound.place(places, rows, starts, choices, counts)


@dataclass(frozen=True, slots=True)
class _Launches:
    num_counts: int
    choose: Launch
    sum_counts: Launch
    place: Launch


@once_a_layout
def _bound(
    shares: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    logits: torch.Tensor,
    first_expert: int,
    is_normalized: bool,
) -> _Launches:
    name, (count, num_experts), num_chosen, own = "route_experts", logits.shape, shares.shape[1], starts.numel() - 1
    check_rows(name, logits=logits)
    if not 0 < num_chosen <= num_experts or not 0 < own <= num_experts - first_expert or first_expert < 0:
        raise ValueError(f"{name}: {num_chosen} chosen of {num_experts}, {own} from {first_expert} on")
    for which, x, shape, dtype in (
        ("shares", shares, (count, num_chosen), torch.float32),
        ("places", places, (count, num_chosen), torch.int32),
        ("rows", rows, (count * num_chosen,), torch.int64),
        ("starts", starts, (own + 1,), torch.int32),
    ):
        check_contiguous(name, which, x, shape, logits)
        if x.dtype != dtype:
            raise ValueError(f"{name}: {which} is {x.dtype}, not {dtype}")
    tokens, padded_experts, num_warps = _tile(num_experts)
    tiles = cdiv(count, tokens)
    sizes = {"EXPERTS": num_experts, "PADDED_EXPERTS": padded_experts, "CHOSEN": num_chosen, "TOKENS": tokens}
    of_compiler = {"num_warps": num_warps, "maxnreg": _REGISTERS}
    choose = Launch(
        _choose_kernel,
        (tiles,),
        (count, logits.stride(0)),
        PADDED_CHOSEN=next_power_of_2(num_chosen),
        IS_NORMALIZED=is_normalized,
        **of_compiler,
        **sizes,
    )
    summed = {"EXPERTS": num_experts, "TILES": _SUMMED_TILES, "BLOCK": _SUMMED_EXPERTS}
    sum_counts = Launch(_sum_counts_kernel, (cdiv(num_experts, _SUMMED_EXPERTS),), (tiles,), **summed)
    place = Launch(_place_kernel, (tiles,), (count, first_expert), OWN=own, **of_compiler, **sizes)
    return _Launches((tiles + 1) * num_experts, choose, sum_counts, place)


def _tile(num_experts: int) -> tuple[int, int, int]:
    """(tokens, experts, warps) of a tile: what experts leave of `_ELEMENTS`."""
    padded = next_power_of_2(num_experts)
    return max(min(_ELEMENTS // padded, _MAX_TOKENS), 1), padded, 8


def variants() -> Iterator[Variant]:
    """Mixtral's, Qwen3-MoE's and as many as there are anywhere, in their types."""
    shapes = [
        ("bf16", 8, 2, 8),
        ("bf16", 128, 8, 128),
        ("bf16", 128, 8, 32),
        ("fp32", 60, 4, 60),
        ("fp16", 512, 10, 512),
    ]
    for dtype, num_experts, num_chosen, own in shapes:
        tokens, padded, num_warps = _tile(num_experts)
        sizes = {"EXPERTS": num_experts, "PADDED_EXPERTS": padded, "CHOSEN": num_chosen, "TOKENS": tokens}
        yield Variant(
            f"route_experts {dtype} {num_chosen} of {num_experts}, {own} here",
            _choose_kernel,
            {"shares": "*fp32", "choices": "*i32", "counts": "*i32", "logits": f"*{dtype}", "count": "i32"}
            | {"stride": "i32"},
            sizes | {"PADDED_CHOSEN": next_power_of_2(num_chosen), "IS_NORMALIZED": num_chosen > 2},
            num_warps=num_warps,
            max_registers=_REGISTERS,
            divisible_by_16=("shares", "choices", "counts", "logits", *["stride"] * (num_experts % 16 == 0)),
            may_spill=False,
        )
        yield Variant(
            f"route_experts sums {num_chosen} of {num_experts}, {own} here",
            _sum_counts_kernel,
            {"counts": "*i32", "tiles": "i32"},
            {"EXPERTS": num_experts, "TILES": _SUMMED_TILES, "BLOCK": _SUMMED_EXPERTS},
            divisible_by_16=("counts",),
            may_spill=False,
        )
        yield Variant(
            f"route_experts places {num_chosen} of {num_experts}, {own} here",
            _place_kernel,
            {"places": "*i32", "rows": "*i64", "starts": "*i32", "choices": "*i32", "counts": "*i32"}
            | {"count": "i32", "first_expert": "i32"},
            sizes | {"OWN": own},
            num_warps=num_warps,
            max_registers=_REGISTERS,
            divisible_by_16=("places", "rows", "starts", "choices", "counts"),
            may_spill=False,
        )
