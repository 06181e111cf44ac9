"""A mixture of experts on a device that multiplies all of their rows in one launch; see `Experts` for the formula.

Rows are sorted by their experts on the device: the host never learns how many each has, and so never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Protocol

import torch

from kernels.e4m3_weight import quantize_e4m3
from kernels.quantized_weight import QuantizedWeight
from worker_svc.models.checkpoint.fused_parts import in_order, stored_rows
from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.experts.router import Router
from worker_svc.models.mlp import activation
from worker_svc.models.parts import ModelPart
from worker_svc.models.quantized.fp8_store import Fp8Store
from worker_svc.models.quantized.quantized_layer import drop_zero_biases
from worker_svc.models.quantized.shaping import fit_together, side_by_side, some_outputs
from worker_svc.models.style import DecoderStyle


class ExpertWeights(Protocol):
    """Of all experts: a tensor, or what a device's kernels keep in few bits."""

    @property
    def shape(self) -> Sequence[int]:
        """[experts, outputs, inputs]."""

    @property
    def nbytes(self) -> int:
        """Of them all."""


class GroupedExperts:
    """Calls map x [T, hidden] to [T, hidden]."""

    def __init__(
        self,
        router: Router,
        inner: ExpertWeights,
        outer: ExpertWeights,
        style: DecoderStyle,
        kernels: ModuleType,
        numbers: range,
        multiply: Callable[..., None],
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> None:
        """`inner` [experts, 2 n, hidden], gates and then ups, or without gates [experts, n, hidden]; `outer`
        [experts, hidden, n]: of the experts of these `numbers`; what the router sends to others adds nothing. The style
        is one with experts. `multiply`: `grouped_matmul`, or that of such weights. `biases` [experts, outputs]: of
        both products, or of neither."""
        assert style.experts is not None
        self._router, self._inner, self._outer, self._style = router, inner, outer, style.experts
        self._activate, self._kernels, self._multiply = activation(style, kernels), kernels, multiply
        self._first_expert, self._biases = numbers.start, biases

    @property
    def weight_bytes(self) -> int:
        """Router and experts, chosen or not."""
        of_biases = sum(bias.nbytes for bias in self._biases if bias is not None)
        return self._router.weight_bytes + self._inner.nbytes + self._outer.nbytes + of_biases

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Experts`; a row adds its experts up in float32, the one of the largest share first."""
        num_tokens, num_chosen = x.shape[0], self._style.num_chosen
        num_rows, num_own, kernels = num_tokens * num_chosen, self._inner.shape[0], self._kernels
        shares = x.new_empty(num_tokens, num_chosen, dtype=torch.float32)
        places = x.new_empty(num_tokens, num_chosen, dtype=torch.int32)
        rows, starts = x.new_empty(num_rows, dtype=torch.int64), x.new_empty(num_own + 1, dtype=torch.int32)
        self._router.route(shares, places, rows, starts, x=x, first_expert=self._first_expert)
        inner_bias, outer_bias = self._biases
        # Room for the rows of all experts; those that are elsewhere leave the end of it as it is.
        inner = x.new_empty(num_rows, self._inner.shape[1])
        self._multiply(inner, x, self._inner, starts, rows, bias=inner_bias)
        activated = inner.new_empty(num_rows, self._outer.shape[2])
        self._activate(activated, inner)
        made = x.new_empty(num_rows, x.shape[1])
        self._multiply(made, activated, self._outer, starts, bias=outer_bias)
        out = torch.empty_like(x)
        kernels.combine_experts(out, made, shares, places)
        return out


def take_grouped_experts(
    part: ModelPart, weights: Weights, prefix: str, router: Router, kernels: ModuleType
) -> GroupedExperts:
    """The weights of this rank's experts, read into two tensors, or kept in few bits where the checkpoint has
    them so and the device multiplies them together."""
    config, style, names = part.whole, part.whole.style, part.whole.style.names
    assert style.experts is not None
    hidden, size, num_parts = config.hidden_size, style.experts.intermediate_size, 2 if style.is_gated else 1
    neurons = part.neurons(size, of_experts=True)
    turns = size if names.has_gates_in_turn else 1
    into = _Product(names.expert_in, [size] * num_parts, [neurons] * num_parts, hidden, range(hidden), turns)
    out_of = _Product((names.expert_out,), [hidden], [range(hidden)], size, neurons)
    for number in range(style.experts.num_experts):
        if number not in part.experts:
            for product in (*names.expert_in, names.expert_out):
                weights.ignore(f"{prefix}{names.expert.format(number)}{product}.weight")
                weights.ignore(f"{prefix}{names.expert.format(number)}{product}.bias")
    prefixes = [prefix + names.expert.format(number) for number in part.experts]
    inner, outer = (_few_bits(weights, prefixes, product, kernels) for product in (into, out_of))
    multiply = partial(kernels.grouped_matmul, of_experts=style.experts.num_experts)
    if inner is not None and outer is not None:
        may_expand = not weights.is_batch_invariant
        multiply = partial(
            kernels.grouped_quantized_matmul, of_experts=style.experts.num_experts, may_expand=may_expand
        )
    else:
        inner, outer = (_plain(weights, prefixes, product) for product in (into, out_of))
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if not style.experts.are_biased:
        _drop_zero_biases(weights, prefixes, (into, out_of))
    else:
        biases = _biases(weights, prefixes, into), _biases(weights, prefixes, out_of)
    return GroupedExperts(router, inner, outer, style, kernels, part.experts, multiply, biases)


@dataclass(frozen=True, slots=True)
class _Product:
    """One product of each expert, whose outputs are parts of some sizes; the rest as `take_linear` takes it."""

    names: tuple[str, ...]  # of the parts, or of all in one
    sizes: Sequence[int]
    outputs: Sequence[range]
    num_inputs: int
    inputs: range
    num_turns: int = 1

    @property
    def stored_sizes(self) -> Sequence[int]:
        """Outputs of each name."""
        return [sum(self.sizes)] if len(self.names) == 1 else self.sizes

    @property
    def rows(self) -> list[list[range]]:
        """Of each name, the outputs that are wanted."""
        if len(self.names) == 1:
            return [stored_rows(self.sizes, self.outputs, self.num_turns, is_fused=True)]
        return [[part] for part in self.outputs]

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [n, ...] as they are stored, part after part."""
        return in_order(x, self.sizes, self.num_turns)


def _plain(weights: Weights, prefixes: Sequence[str], product: _Product) -> torch.Tensor:
    """[experts, outputs of all parts, inputs]."""
    for prefix in prefixes:
        for name in product.names:
            if kind := weights.format_of(f"{prefix}{name}.weight"):
                weights.quantized.note_expanded(kind, "not all experts can be multiplied together in few bits")
    taken = _taken(weights, prefixes, product, "weight", product.num_inputs, columns=[product.inputs])
    if product.num_turns > 1:
        for weight in taken:  # one by one: of all, a second copy might not fit
            weight.copy_(product.in_order(weight))
    return taken


def _biases(weights: Weights, prefixes: Sequence[str], product: _Product) -> torch.Tensor | None:
    """[experts, outputs of all parts]; None where another rank adds them to the sum of all."""
    if product.inputs.start > 0:
        for prefix in prefixes:
            for name in product.names:
                weights.ignore(f"{prefix}{name}.bias")
        return None
    taken = _taken(weights, prefixes, product, "bias")
    return torch.stack([product.in_order(bias) for bias in taken]) if product.num_turns > 1 else taken


def _drop_zero_biases(weights: Weights, prefixes: Sequence[str], products: Sequence[_Product]) -> None:
    """See `drop_zero_biases`; of the experts' products that are quantised."""
    for product in products:
        for prefix in prefixes:
            names = [prefix + name for name in product.names]
            if any(weights.format_of(f"{name}.weight") for name in names):
                drop_zero_biases(weights, names, product.sizes)


def _taken(
    weights: Weights,
    prefixes: Sequence[str],
    product: _Product,
    leaf: str,
    *rest: int,
    columns: Sequence[range] | None = None,
) -> torch.Tensor:
    """[experts, outputs as they are stored, ...]."""
    tensors = [f"{prefix}{name}.{leaf}" for prefix in prefixes for name in product.names]
    sizes, wanted = [*product.stored_sizes] * len(prefixes), product.rows * len(prefixes)
    starts = accumulate(sizes, initial=0)
    rows = [
        range(start + some.start, start + some.stop)
        for start, of_tensor in zip(starts, wanted, strict=False)
        for some in of_tensor
    ]
    taken = weights.take_parts(tensors, sizes, *rest, rows=rows, columns=columns)
    return taken.view(len(prefixes), -1, *taken.shape[1:])


def _few_bits(
    weights: Weights, prefixes: Sequence[str], product: _Product, kernels: ModuleType
) -> ExpertWeights | None:
    """None where the device has no product of such experts together, or they are not all of one format."""
    tensors = [f"{prefix}{name}.weight" for prefix in prefixes for name in product.names]
    is_whole = len(product.inputs) == product.num_inputs
    if not hasattr(kernels, "pack_experts") or not tensors:
        return None
    packed: ExpertWeights | None
    if isinstance(weights.store, Fp8Store) and not any(map(weights.format_of, tensors)):
        packed = kernels.pack_experts(quantize_e4m3(_plain(weights, [prefix], product)[0]) for prefix in prefixes)
        return packed
    if not all(weights.format_of(tensor) and (is_whole or weights.can_cut_inputs(tensor)) for tensor in tensors):
        return None

    def read(prefix: str) -> QuantizedWeight | None:
        parts = [
            weights.take_quantized(f"{prefix}{name}.weight", size, product.num_inputs, rows, product.inputs)
            for name, size, rows in zip(product.names, product.stored_sizes, product.rows, strict=True)
        ]
        if not all(fit_together(parts[0], part) for part in parts):
            return None
        weight = side_by_side(parts)
        if product.num_turns > 1:
            index = torch.arange(weight.out_features, device=weight.codes.device)
            weight = some_outputs(weight, product.in_order(index))
        return weight

    packed = kernels.pack_experts(map(read, prefixes))
    return packed
