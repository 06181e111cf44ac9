"""A mixture of experts on a device that multiplies all of their rows in one launch; see `Experts` for the formula.

Rows are sorted by their experts on the device: the host never learns how many each has, and so never waits.
"""

from __future__ import annotations

from types import ModuleType

import torch

from worker_svc.models.linear import Linear
from worker_svc.models.mlp import activation
from worker_svc.models.parts import ModelPart
from worker_svc.models.style import DecoderStyle
from worker_svc.models.weights import Weights


class GroupedExperts:
    """Calls map x [T, hidden] to [T, hidden]."""

    def __init__(
        self,
        router: Linear,
        inner: torch.Tensor,
        outer: torch.Tensor,
        style: DecoderStyle,
        kernels: ModuleType,
        numbers: range,
    ) -> None:
        """`inner` [experts, 2 n, hidden], gates and then ups, or without gates [experts, n, hidden]; `outer`
        [experts, hidden, n]: of the experts of these `numbers`; what the router sends to others adds nothing. The style
        is one with experts."""
        assert style.experts is not None
        self._router, self._inner, self._outer, self._style = router, inner, outer, style.experts
        self._activate, self._multiply = activation(style, kernels), kernels.grouped_matmul
        self._edges = torch.arange(numbers.start, numbers.stop + 1, device=inner.device)
        self._has_all = len(numbers) == style.experts.num_experts

    @property
    def weight_bytes(self) -> int:
        """Router and experts, chosen or not."""
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
        # Rows of experts that are elsewhere stay as they are made.
        sorted_rows = (x.new_empty if self._has_all else x.new_zeros)(order.numel(), x.shape[1])
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
    part: ModelPart, weights: Weights, prefix: str, router: Linear, kernels: ModuleType
) -> GroupedExperts:
    """The weights of this rank's experts, read into two tensors."""
    config, style, names = part.whole, part.whole.style, part.whole.style.names
    assert style.experts is not None
    count, own, size = style.experts.num_experts, part.experts, style.experts.intermediate_size
    neurons = part.neurons(size, of_experts=True)

    def take(products: tuple[str, ...], num_outputs: int, outputs: range, size: int, inputs: range) -> torch.Tensor:
        """[experts, products * outputs, inputs]."""
        tensors: list[str] = []
        rows: list[range] = []
        for number in range(count):
            for product in products:
                name = f"{prefix}{names.expert.format(number)}{product}.weight"
                if number in own:
                    if kind := weights.format_of(name):  # there is no product of many experts' weights of few bits
                        weights.quantized.note_expanded(kind, "experts are multiplied together")
                    start = len(tensors) * num_outputs
                    tensors.append(name)
                    rows.append(range(start + outputs.start, start + outputs.stop))
                else:
                    weights.ignore(name)
        sizes = [num_outputs] * len(tensors)
        taken = weights.take_parts(tensors, sizes, size, rows=rows, columns=[inputs])
        return taken.view(len(own), -1, *taken.shape[1:])

    hidden = config.hidden_size
    inner = take(names.expert_in, size, neurons, hidden, range(hidden))
    outer = take((names.expert_out,), hidden, range(hidden), size, neurons)
    return GroupedExperts(router, inner, outer, style, kernels, own)
