"""Takes a product from a checkpoint that has its weight, or some part of it, in few bits; see `linear.take_linear`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.quantized_weight import QuantizedWeight
from worker_svc.models.checkpoint.fused_parts import in_order, stored_rows
from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.errors import ModelError
from worker_svc.models.products.dense import dense
from worker_svc.models.products.quantized_store import QuantizedStore
from worker_svc.models.products.summed import Layer
from worker_svc.models.quantized.separate_products import side_by_side_products
from worker_svc.models.quantized.shaping import fit_together, side_by_side, some_outputs


@dataclass(frozen=True, slots=True)
class _Part:
    """Some outputs of a product; plain ones where `kind` is empty."""

    kind: str
    name: str  # in the checkpoint, of the first of them
    weight: QuantizedWeight | torch.Tensor
    bias: torch.Tensor | None


def take_quantized(
    weights: Weights,
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    outputs: Sequence[range],
    inputs: range,
    *,
    is_biased: bool,
    num_turns: int,
    is_exact: bool = False,
) -> Layer:
    """Parts that are quantised alike are one product, others products of their own.

    Where the model's products are quantised when they are loaded, weights that the checkpoint has in few enough bits
    (`QuantizedStore.keeps`) stay as they are, and rows are rounded; others are quantised; `is_exact`: neither.

    Raises ModelError for a weight that cannot be read as it is to be taken, and for a bias that the model has not.
    """
    if len(names) == 1:
        rows_of_names = [stored_rows(sizes, outputs, num_turns, is_fused=True)]
        sizes_of_names: Sequence[int] = [sum(sizes)]
    else:
        rows_of_names, sizes_of_names = [[part] for part in outputs], sizes
    parts: list[list[_Part]] = []  # that are one product each
    for name, size, rows in zip(names, sizes_of_names, rows_of_names, strict=True):
        part = _take(weights, name, size, in_features, [some for some in rows if some], inputs, is_biased)
        if num_turns > 1:
            part = _turned(part, sizes, num_turns)
        if parts and _fit_together(parts[-1][-1], part):
            parts[-1].append(part)
        else:
            parts.append([part])
    return side_by_side_products([_made(weights, _joined(some), is_exact) for some in parts])


def drop_zero_biases(weights: Weights, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Writers of some formats give every layer a bias, of zeros where the model has none. Raises ModelError for one of
    other numbers."""
    for name, size in zip(names, sizes if len(names) > 1 else [sum(sizes)], strict=True):
        if weights.has(f"{name}.bias") and weights.take(f"{name}.bias", size).any():
            raise ModelError(f"{name}.bias is not zero, and the model has no place for it")


def _take(
    weights: Weights, name: str, size: int, in_features: int, rows: list[range], inputs: range, is_biased: bool
) -> _Part:
    stored = f"{name}.weight"
    bias = weights.take_parts([f"{name}.bias"], [size], rows=rows) if is_biased else None
    kind = weights.format_of(stored)
    if kind and rows:
        if len(inputs) == in_features or weights.can_cut_inputs(stored):
            return _Part(kind, name, weights.take_quantized(stored, size, in_features, rows, inputs), bias)
        weights.quantized.note_expanded(kind, "inputs that share scales lie apart, and ranks share them")
    return _Part("", name, weights.take_parts([stored], [size], in_features, rows=rows, columns=[inputs]), bias)


def _turned(part: _Part, sizes: Sequence[int], num_turns: int) -> _Part:
    weight = part.weight
    if isinstance(weight, QuantizedWeight):
        index = torch.arange(weight.out_features, device=weight.codes.device)
        turned: QuantizedWeight | torch.Tensor = some_outputs(weight, in_order(index, sizes, num_turns))
    else:
        turned = in_order(weight, sizes, num_turns)
    return replace(part, weight=turned, bias=None if part.bias is None else in_order(part.bias, sizes, num_turns))


def _fit_together(one: _Part, other: _Part) -> bool:
    if isinstance(one.weight, QuantizedWeight) and isinstance(other.weight, QuantizedWeight):
        return fit_together(one.weight, other.weight)
    return isinstance(one.weight, torch.Tensor) and isinstance(other.weight, torch.Tensor)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Those that `_fit_together`, one after the other."""
    first, *others = parts
    if not others:
        return first
    biases = [part.bias for part in parts if part.bias is not None]
    quantized = [part.weight for part in parts if isinstance(part.weight, QuantizedWeight)]
    plain = [part.weight for part in parts if isinstance(part.weight, torch.Tensor)]
    weight = side_by_side(quantized) if quantized else torch.cat(plain)
    return _Part(first.kind, first.name, weight, torch.cat(biases) if biases else None)


def _made(weights: Weights, part: _Part, is_exact: bool) -> Layer:
    store, products, weight = weights.store, weights.quantized, part.weight
    if is_exact or not isinstance(store, QuantizedStore):
        if isinstance(weight, QuantizedWeight):
            return products.make(part.kind, weight, part.bias, is_batch_invariant=weights.is_batch_invariant)
        return dense(weight, part.bias, is_batch_invariant=weights.is_batch_invariant)
    if isinstance(weight, QuantizedWeight):
        if store.keeps(weight.numbers) and (product := products.with_rounded_rows(weight, part.bias)) is not None:
            return product
        found = store.find(part.name, weight.out_features, weight.in_features)
        return found or store.make(part.name, products.expanded(weight), part.bias)
    return store.find(part.name, *weight.shape) or store.make(part.name, weight, part.bias)
