"""Products: dense ones of fixed tiles, whose cost is that of being the same for any batch, and those of experts, with
the way of tokens there and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch

from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.shapes import HIDDEN, INTERMEDIATE
from kernels.gpu.operations import combine_experts, grouped_matmul, matmul, route_experts

_ROWS = (1, 16, 256, 4096)
_MATRIX_ROWS = 64  # from here on the matrix units are the bound, below it reading the weight
# (experts, experts of a token, outputs, inputs) of Mixtral 8x7B and of Qwen3 30B-A3B: gate and up in one
_EXPERTS = ((8, 2, 2 * 14336, 4096), (128, 8, 2 * 768, 2048))
_EXPERT_TOKENS = (16, 256, 4096)


def cases(setting: Setting) -> Iterator[Case]:
    """A layer's two products by rows, then experts by tokens."""
    shapes = ((40, 48),) if setting.is_tiny else ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    for outputs, size in shapes:
        for rows in (3,) if setting.is_tiny else _ROWS:
            yield _matmul(setting, rows, outputs, size)
        yield _matmul(setting, 8 if setting.is_tiny else _ROWS[-1], outputs, size, may_describe=False)
    for experts in ((3, 2, 40, 48),) if setting.is_tiny else _EXPERTS:
        for num_tokens in (5,) if setting.is_tiny else _EXPERT_TOKENS:
            yield _grouped_matmul(setting, num_tokens, *experts)
            yield _route_experts(setting, num_tokens, *experts[:2])
            yield _combine_experts(setting, num_tokens, experts[1], experts[3])


def _matmul(setting: Setting, rows: int, outputs: int, size: int, may_describe: bool = True) -> Case:
    def build() -> Calls:
        x, weight = _normal(setting, rows, size), _normal(setting, outputs, size)
        out = torch.empty(rows, outputs, dtype=setting.dtype, device=setting.device)

        def ours() -> torch.Tensor:
            matmul(out, x, weight, may_describe=may_describe)
            return out

        return Calls(ours, {"matmul": functools.partial(torch.matmul, x, weight.T)})

    return Case(
        op="matmul",
        shape=f"{rows:,} x {size:,} to {outputs:,}{', by address' * (not may_describe)}",
        num_bytes=(rows * size + outputs * size + rows * outputs) * setting.dtype.itemsize,
        flops=2 * rows * outputs * size,
        product=(rows, outputs, size, setting.dtype) if rows >= _MATRIX_ROWS else None,
        build=build,
        goal=Goal(0.7, peer="matmul"),
    )


def _grouped_matmul(setting: Setting, num_tokens: int, num_experts: int, chosen: int, outputs: int, size: int) -> Case:
    rows = num_tokens * chosen
    touched = min(num_experts, rows)  # experts whose weights are read, of so many rows that are spread evenly
    return Case(
        op="grouped_matmul",
        shape=f"{num_tokens:,} tokens, {chosen} of {num_experts} experts, {size:,} to {outputs:,}",
        num_bytes=(num_tokens * size + touched * outputs * size + rows * outputs) * setting.dtype.itemsize,
        flops=2 * rows * outputs * size,
        product=(rows, outputs, size, setting.dtype) if rows // num_experts >= _MATRIX_ROWS else None,
        build=functools.partial(_grouped_calls, setting, num_tokens, num_experts, chosen, outputs, size),
    )


def _route_experts(setting: Setting, num_tokens: int, num_experts: int, chosen: int) -> Case:
    def build() -> Calls:
        device, logits = setting.device, _normal(setting, num_tokens, num_experts)
        shares = torch.empty(num_tokens, chosen, device=device)
        places = torch.empty(num_tokens, chosen, dtype=torch.int32, device=device)
        rows = torch.empty(num_tokens * chosen, dtype=torch.int64, device=device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        edges = torch.arange(num_experts + 1, device=device)

        def ours() -> None:  # equal shares may be in another order than torch's
            route_experts(shares, places, rows, starts, logits, is_normalized=True)

        def plain() -> None:
            found, experts = logits.float().softmax(-1).topk(chosen, dim=-1)
            found /= found.sum(-1, keepdim=True)
            experts, order = experts.flatten().sort(stable=True)
            torch.searchsorted(experts, edges, out_int32=True)
            torch.empty_like(order)[order] = order

        return Calls(ours, {"softmax, topk, sort": plain})

    return Case(
        op="route_experts",
        shape=f"{num_tokens:,} tokens, {chosen} of {num_experts} experts",
        num_bytes=num_tokens * (num_experts * setting.dtype.itemsize + chosen * 16),
        build=build,
    )


def _combine_experts(setting: Setting, num_tokens: int, chosen: int, size: int) -> Case:
    def build() -> Calls:
        x, out = _normal(setting, num_tokens * chosen, size), _normal(setting, num_tokens, size)
        shares = torch.rand(num_tokens, chosen, device=setting.device)
        places = torch.randperm(num_tokens * chosen, device=setting.device).view(num_tokens, chosen).int()

        def ours() -> torch.Tensor:
            combine_experts(out, x, shares, places)
            return out

        def plain() -> torch.Tensor:
            return (x[places.long()] * shares[:, :, None]).sum(1).to(x.dtype)

        return Calls(ours, {"index, mul, sum": plain})

    return Case(
        op="combine_experts",
        shape=f"{num_tokens:,} tokens of {size:,}, {chosen} experts each",
        num_bytes=num_tokens * (chosen + 1) * size * setting.dtype.itemsize,
        build=build,
    )


def _grouped_calls(setting: Setting, num_tokens: int, num_experts: int, chosen: int, outputs: int, size: int) -> Calls:
    """Each token goes to other experts of its own; rows are given as what they are, numbers of tokens."""
    device, rows = setting.device, num_tokens * chosen
    x, weights = _normal(setting, num_tokens, size), _normal(setting, num_experts, outputs, size)
    experts = torch.arange(rows, device=device) % num_experts
    order = experts.argsort(stable=True)
    tokens = order // chosen
    starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    starts[1:] = torch.bincount(experts, minlength=num_experts).cumsum(0)
    out = torch.empty(rows, outputs, dtype=setting.dtype, device=device)
    of_experts = [slice(start, end) for start, end in pairwise(starts.tolist())]

    def ours() -> torch.Tensor:
        grouped_matmul(out, x, weights, starts, tokens)
        return out

    def loop() -> torch.Tensor:
        parts = [x[tokens[of_one]] @ weight.T for weight, of_one in zip(weights, of_experts, strict=True)]
        return torch.cat(parts)

    peers = {"matmul an expert": loop}
    if device.type == "cuda":
        peers["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(x[tokens], weights.mT, offs=starts[1:])
    return Calls(ours, peers)


def _normal(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=setting.dtype, device=setting.device)
