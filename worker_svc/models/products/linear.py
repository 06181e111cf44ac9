"""Dense layers, y = x W^T + b: what all forms of them have in common, and how one is taken from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker_svc.models.checkpoint.fused_parts import in_order, stored_rows
from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.products.dense import dense
from worker_svc.models.quantized.fp8_store import Fp8Store
from worker_svc.models.quantized.quantized_layer import drop_zero_biases, take_quantized


class Linear(Protocol):
    """A dense layer. On a CPU a row's result depends on nothing beside it, bit for bit."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that weight and bias occupy on the device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features], contiguous, to [T, out_features]."""


def take_linear(
    weights: Weights,
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    *,
    outputs: Sequence[range] | None = None,
    inputs: range | None = None,
    is_biased: bool = False,
    is_transposed: bool = False,
    num_turns: int = 1,
    is_exact: bool = False,
) -> Linear:
    """One product whose outputs are parts of these sizes: the checkpoint has each under its name, or all under one.

    `outputs`: of each part, those that are wanted (default: all). `inputs`: those that are (default: all); the bias
    goes with the first of them, for this product is then one of several to be summed.
    `is_transposed`: stored [in, out], all under one name. `num_turns`: stored as so many equal shares of the first
    part, the second, ..., and again, as one head's query, key and value may lie before the next one's. `is_exact`:
    never quantised, and its rows are not rounded.
    """
    outputs = [range(size) for size in sizes] if outputs is None else outputs
    inputs = range(in_features) if inputs is None else inputs
    has_quantized = any(weights.format_of(f"{name}.weight") for name in names)
    if has_quantized and not is_biased:
        drop_zero_biases(weights, names, sizes)
    if is_biased and inputs.start > 0:
        is_biased = False
        for name in names:
            weights.ignore(f"{name}.bias")
    store = weights.store
    if store is not None and (found := store.find(names[0], sum(sizes), in_features)) is not None:
        for name in names:
            weights.ignore(f"{name}.weight")
            weights.ignore(f"{name}.bias")
        return found
    if has_quantized:
        return take_quantized(
            weights,
            names,
            sizes,
            in_features,
            outputs,
            inputs,
            is_biased=is_biased,
            num_turns=num_turns,
            is_exact=is_exact,
        )
    whole = [sum(sizes)] if len(names) == 1 else sizes
    rows = stored_rows(sizes, outputs, num_turns, is_fused=len(names) == 1)
    stored = [f"{name}.weight" for name in names]
    if is_transposed:  # those are [out, in] whatever the others are
        (size,) = whole
        weight = weights.take_matrix(stored, [in_features], size, rows=[inputs], columns=rows, is_passing=True).t()
    else:
        weight = weights.take_matrix(stored, whole, in_features, rows=rows, columns=[inputs], is_passing=True)
    bias = weights.take_parts([f"{name}.bias" for name in names], whole, rows=rows) if is_biased else None
    weight, bias = in_order(weight, sizes, num_turns), None if bias is None else in_order(bias, sizes, num_turns)
    if store is not None and not is_exact:
        return store.make(names[0], weight, bias)
    return _dense(weights, weight, bias)


def tied_linear(weights: Weights, name: str, weight: torch.Tensor) -> Linear:
    """A product with a matrix that has been taken for something else: a head."""
    if weights.store is None or isinstance(weights.store, Fp8Store):
        return _dense(weights, weight)
    return weights.store.find(name, *weight.shape) or weights.store.make(name, weight)


def _dense(weights: Weights, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    is_invariant = weights.is_batch_invariant
    return dense(weight, bias, is_batch_invariant=is_invariant, dtype=weights.dtype)
