"""A mixture of experts on a device that multiplies all of their rows in one launch; see `Experts` for the formula.

Rows are sorted by their experts on the device: the host never learns how many each has, and so never waits.
"""

from __future__ import annotations

from types import ModuleType

import torch

from worker_svc.models.config import ModelConfig
from worker_svc.models.linear import Linear
from worker_svc.models.mlp import activation
from worker_svc.models.style import DecoderStyle, ExpertStyle
from worker_svc.models.weights import Weights


class GroupedExperts:
    """Calls map x [T, hidden] to [T, hidden]."""

    def __init__(
        self, router: Linear, inner: torch.Tensor, outer: torch.Tensor, style: DecoderStyle, kernels: ModuleType
    ) -> None:
        """`inner` [num_experts, 2 n, hidden], gates and then ups, or without gates [num_experts, n, hidden]; `outer`
        [num_experts, hidden, n]. The style is one with experts."""
        assert style.experts is not None
        self._router, self._inner, self._outer, self._style = router, inner, outer, style.experts
        self._activate, self._multiply = activation(style, kernels), kernels.grouped_matmul
        self._edges = torch.arange(inner.shape[0] + 1, device=inner.device)

    @property
    def weight_bytes(self) -> int:
        """Router and all experts, chosen or not."""
        return self._router.weight_bytes + self._inner.nbytes + self._outer.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Experts`; a row adds its experts up in float32, the one of the largest share first."""
        num_chosen = self._style.num_chosen
        shares, chosen = self._router(x).float().softmax(-1).topk(num_chosen, dim=-1)  # [T, num_chosen]
        if self._style.is_normalized:
            shares /= shares.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)  # [T * num_chosen]; order: row * num_chosen + choice
        starts = torch.searchsorted(experts, self._edges, out_int32=True)
        inner = x.new_empty(order.numel(), self._inner.shape[1])
        self._multiply(inner, x, self._inner, starts, order // num_chosen)
        activated = inner.new_empty(inner.shape[0], self._outer.shape[2])
        self._activate(activated, inner)
        sorted_rows = x.new_empty(order.numel(), x.shape[1])
        self._multiply(sorted_rows, activated, self._outer, starts)
        rows = torch.empty_like(sorted_rows)
        rows[order] = sorted_rows
        rows = rows.view(x.shape[0], num_chosen, x.shape[1])
        # One by one, so that a row's sum does not depend on others.
        total = torch.zeros_like(x, dtype=torch.float32)
        for choice in range(num_chosen):
            total += rows[:, choice] * shares[:, choice, None]
        return total.to(x.dtype)


def take_grouped_experts(
    config: ModelConfig, weights: Weights, prefix: str, router: Linear, experts: ExpertStyle, kernels: ModuleType
) -> GroupedExperts:
    """Every expert's weights, read into two tensors."""
    style, names, count = config.style, config.style.names, experts.num_experts
    num_inner = experts.intermediate_size * (2 if style.is_gated else 1)

    def take(parts: tuple[str, ...], num_outputs: int, size: int) -> torch.Tensor:
        expert_names = [prefix + names.expert.format(index) for index in range(count)]
        tensors = [f"{name}{part}.weight" for name in expert_names for part in parts]
        whole = weights.take_parts(tensors, [num_outputs // len(parts)] * len(tensors), size)
        return whole.view(count, -1, *whole.shape[1:])

    inner = take(names.expert_in, num_inner, config.hidden_size)
    outer = take((names.expert_out,), config.hidden_size, experts.intermediate_size)
    return GroupedExperts(router, inner, outer, style, kernels)
