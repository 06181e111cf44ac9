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
        self._activate, self._kernels = activation(style, kernels), kernels
        self._first_expert = numbers.start

    @property
    def weight_bytes(self) -> int:
        """Router and experts, chosen or not."""
        return self._router.weight_bytes + self._inner.nbytes + self._outer.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Experts`; a row adds its experts up in float32, the one of the largest share first."""
        num_tokens, num_chosen = x.shape[0], self._style.num_chosen
        num_rows, num_own, kernels = num_tokens * num_chosen, self._inner.shape[0], self._kernels
        shares = x.new_empty(num_tokens, num_chosen, dtype=torch.float32)
        places = x.new_empty(num_tokens, num_chosen, dtype=torch.int32)
        rows, starts = x.new_empty(num_rows, dtype=torch.int64), x.new_empty(num_own + 1, dtype=torch.int32)
        of_route = {"first_expert": self._first_expert, "is_normalized": self._style.is_normalized}
        kernels.route_experts(shares, places, rows, starts, self._router(x), **of_route)
        # Room for the rows of all experts; those that are elsewhere leave the end of it as it is.
        inner = x.new_empty(num_rows, self._inner.shape[1])
        kernels.grouped_matmul(inner, x, self._inner, starts, rows)
        activated = inner.new_empty(num_rows, self._outer.shape[2])
        self._activate(activated, inner)
        made = x.new_empty(num_rows, x.shape[1])
        kernels.grouped_matmul(made, activated, self._outer, starts)
        out = torch.empty_like(x)
        kernels.combine_experts(out, made, shares, places)
        return out


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
