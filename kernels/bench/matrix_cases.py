"""Products: dense ones of fixed tiles, whose cost is that of being the same for any batch, and those of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch

from kernels.bench.case import Calls, Case, Setting
from kernels.bench.shapes import HIDDEN, INTERMEDIATE
from kernels.gpu.operations import grouped_matmul, matmul

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
    for experts in ((3, 2, 40, 48),) if setting.is_tiny else _EXPERTS:
        for num_tokens in (5,) if setting.is_tiny else _EXPERT_TOKENS:
            yield _grouped_matmul(setting, num_tokens, *experts)


def _matmul(setting: Setting, rows: int, outputs: int, size: int) -> Case:
    def build() -> Calls:
        x, weight = _normal(setting, rows, size), _normal(setting, outputs, size)
        out = torch.empty(rows, outputs, dtype=setting.dtype, device=setting.device)

        def ours() -> torch.Tensor:
            matmul(out, x, weight)
            return out

        return Calls(ours, {"matmul": functools.partial(torch.matmul, x, weight.T)})

    return Case(
        op="matmul",
        shape=f"{rows:,} x {size:,} to {outputs:,}",
        num_bytes=(rows * size + outputs * size + rows * outputs) * setting.dtype.itemsize,
        flops=2 * rows * outputs * size,
        product=(rows, outputs, size, setting.dtype) if rows >= _MATRIX_ROWS else None,
        build=build,
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
