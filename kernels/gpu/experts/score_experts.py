"""What experts are compared by where they are chosen by groups, and the shares of those that win: one launch.

    likely = softmax(logits) or sigmoid(logits),  scores = likely + bias, -inf in groups that are not chosen
    shares = likely of the k largest scores, over their sum, times scale

    logits [T, num_experts]        rows at any stride
    bias f32[num_experts], scores f32[T, num_experts], shares f32[T, k]

Source: DeepSeek-V2 2024 (arXiv:2405.04434) and V3 2024 (arXiv:2412.19437). `route_experts` then sorts rows by the
largest scores, as by any logits. A program takes a tile of tokens; of each, groups and experts are found one after the
other, the best first, of equal ones the first. A token's results depend on its logits alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ELEMENTS = 1024  # of a tile, tokens by experts: 8 a thread
_MAX_TOKENS = 16  # of a tile
_REGISTERS = 255  # of a thread, as many as there are: left to itself, ptxas spills one for more threads at once


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _best(x, numbers, is_free, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(values [tokens, 1] of the largest x that are free, their numbers [tokens, 1]), the first of equal ones."""
    value = tl.max(tl.where(is_free, x, -float("inf")), 1)[:, None]
    return value, tl.min(tl.where(is_free & (x == value), numbers, COUNT), 1)[:, None]


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def _score_kernel(  # type: ignore[no-untyped-def]
    shares,
    scores,
    logits,
    bias,
    count,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert, choice = tl.arange(0, PADDED_EXPERTS)[None, :], tl.arange(0, PADDED_CHOSEN)[None, :]
    inside = (token < count)[:, None]
    is_free = inside & (expert < EXPERTS)
    x = tl.load(logits + token.to(tl.int64)[:, None] * stride + expert, is_free, 0.0).to(tl.float32)
    if IS_SIGMOID:
        likely = 1.0 / (1.0 + tl.exp(-x))
    else:
        x = tl.where(is_free, x, -float("inf"))
        largest = tl.max(tl.where(x == x, x, -float("inf")), 1)[:, None]
        likely = tl.exp(x - tl.where(inside, largest, 0.0))
        likely = likely / tl.where(inside, tl.sum(tl.where(is_free, likely, 0.0), 1)[:, None], 1.0)
    compared = likely
    if bias is not None:
        compared = likely + tl.load(bias + expert, expert < EXPERTS, 0.0)
    compared = tl.where(compared == compared, compared, -float("inf"))
    if GROUPS > 1:
        group, number = expert // (EXPERTS // GROUPS), tl.arange(0, PADDED_GROUPS)[None, :]
        values = tl.full((TOKENS, PADDED_GROUPS), -float("inf"), tl.float32)
        for each in tl.static_range(GROUPS):
            of_group = is_free & (group == each)
            value, first = _best(compared, expert, of_group, PADDED_EXPERTS)
            if bias is not None:
                value += tl.max(tl.where(of_group & (expert != first), compared, -float("inf")), 1)[:, None]
            values = tl.where(number == each, value, values)
        is_closed = number < GROUPS
        is_open = is_free & (expert < 0)
        for _ in tl.static_range(CHOSEN_GROUPS):
            _, best = _best(values, number, is_closed, PADDED_GROUPS)
            is_closed = is_closed & (number != best)
            is_open = is_open | (group == best)
        is_free = is_free & is_open
    place = token.to(tl.int64)[:, None] * EXPERTS + expert
    tl.store(scores + place, tl.where(is_free, compared, -float("inf")), inside & (expert < EXPERTS))
    all_shares = tl.zeros((TOKENS, PADDED_CHOSEN), tl.float32)
    for each in tl.static_range(CHOSEN):
        _, chosen = _best(compared, expert, is_free, PADDED_EXPERTS)
        share = tl.sum(tl.where(expert == chosen, likely, 0.0), 1)[:, None]
        all_shares = tl.where(choice == each, share, all_shares)
        is_free = is_free & (expert != chosen)
    if IS_NORMALIZED:
        all_shares = all_shares / (tl.sum(all_shares, 1)[:, None] + 1e-20)
    tl.store(shares + token[:, None] * CHOSEN + choice, all_shares * scale, inside & (choice < CHOSEN))


def score_experts(
    shares: torch.Tensor,
    scores: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str = "softmax",
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    is_normalized: bool = False,
    scale: float = 1.0,
) -> None:
    """See `reference.score_experts`. Raises ValueError where a shape or type does not fit."""
    tensors = shares, scores, logits, bias
    _bound(tensors, kind, num_groups, num_chosen_groups, is_normalized, scale)(*tensors)


@once_a_layout
def _bound(
    shares: torch.Tensor,
    scores: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    num_groups: int,
    num_chosen_groups: int,
    is_normalized: bool,
    scale: float,
) -> Launch:
    name, (count, num_experts), num_chosen = "score_experts", logits.shape, shares.shape[1]
    check_rows(name, logits=logits)
    if num_experts % num_groups or not 0 < num_chosen_groups <= num_groups:
        raise ValueError(f"{name}: {num_chosen_groups} chosen of {num_groups} groups of {num_experts} experts")
    if not 0 < num_chosen <= num_chosen_groups * (num_experts // num_groups):
        raise ValueError(f"{name}: {num_chosen} chosen of {num_chosen_groups} of {num_groups} groups")
    for which, x, shape in (
        ("shares", shares, (count, num_chosen)),
        ("scores", scores, (count, num_experts)),
        ("bias", bias, (num_experts,)),
    ):
        if x is not None:
            check_contiguous(name, which, x, shape, logits)
            if x.dtype != torch.float32:
                raise ValueError(f"{name}: {which} is {x.dtype}, not float32")
    tokens, padded = _tile(num_experts)
    return Launch(
        _score_kernel,
        (cdiv(count, tokens),),
        (count, logits.stride(0), scale),
        EXPERTS=num_experts,
        PADDED_EXPERTS=padded,
        CHOSEN=num_chosen,
        PADDED_CHOSEN=next_power_of_2(num_chosen),
        GROUPS=num_groups,
        PADDED_GROUPS=next_power_of_2(num_groups),
        CHOSEN_GROUPS=num_chosen_groups,
        TOKENS=tokens,
        IS_SIGMOID=kind == "sigmoid",
        IS_NORMALIZED=is_normalized,
        maxnreg=_REGISTERS,
    )


def _tile(num_experts: int) -> tuple[int, int]:
    """(tokens, experts) of a tile: what experts leave of `_ELEMENTS`."""
    padded = next_power_of_2(num_experts)
    return max(min(_ELEMENTS // padded, _MAX_TOKENS), 1), padded


def variants() -> Iterator[Variant]:
    """DeepSeek-V2-Lite's, V2's, V3's and Kimi-K2's."""
    for num_experts, num_chosen, num_groups, chosen_groups, is_biased in (
        (64, 6, 1, 1, False),
        (160, 6, 8, 3, False),
        (256, 8, 8, 4, True),
        (384, 8, 1, 1, True),
    ):
        tokens, padded = _tile(num_experts)
        pointers = dict.fromkeys(["shares", "scores", "logits", *["bias"] * is_biased], "*fp32")
        yield Variant(
            f"score_experts {num_chosen} of {num_experts} in {chosen_groups} of {num_groups}",
            _score_kernel,
            pointers | {"count": "i32", "stride": "i32", "scale": "fp32"},
            {
                **({} if is_biased else {"bias": None}),
                "EXPERTS": num_experts,
                "PADDED_EXPERTS": padded,
                "CHOSEN": num_chosen,
                "PADDED_CHOSEN": next_power_of_2(num_chosen),
                "GROUPS": num_groups,
                "PADDED_GROUPS": next_power_of_2(num_groups),
                "CHOSEN_GROUPS": chosen_groups,
                "TOKENS": tokens,
                "IS_SIGMOID": is_biased,
                "IS_NORMALIZED": is_biased,
            },
            max_registers=_REGISTERS,
            divisible_by_16=(*pointers, *["stride"] * (num_experts % 16 == 0)),
            may_spill=False,
        )
