"""Dense layers, y = x W^T + b: what all forms of them have in common, and how one is taken from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker_svc.models.dense import dense
from worker_svc.models.weights import Weights


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
    is_biased: bool = False,
    is_transposed: bool = False,
    num_turns: int = 1,
    is_exact: bool = False,
) -> Linear:
    """One product whose outputs are parts of these sizes: the checkpoint has each under its name, or all under one.

    `is_transposed`: stored [in, out], all under one name. `num_turns`: stored as so many equal shares of the first
    part, the second, ..., and again, as one head's query, key and value may lie before the next one's. `is_exact`:
    never quantised.
    """
    store = weights.int8
    if store is not None and (found := store.find(names[0], sum(sizes), in_features)) is not None:
        for name in names:
            weights.ignore(f"{name}.weight")
            weights.ignore(f"{name}.bias")
        return found
    whole = [sum(sizes)] if len(names) == 1 else sizes

    def in_order(x: torch.Tensor) -> torch.Tensor:
        if num_turns == 1:
            return x
        turns = x.unflatten(0, (num_turns, -1)).split([size // num_turns for size in sizes], dim=1)
        return torch.cat([part.flatten(0, 1) for part in turns])

    if is_transposed:
        (name,), (size,) = names, whole
        weight = weights.take(f"{name}.weight", in_features, size).t()
    else:
        weight = weights.take_parts([f"{name}.weight" for name in names], whole, in_features)
    bias = in_order(weights.take_parts([f"{name}.bias" for name in names], whole)) if is_biased else None
    weight = in_order(weight)
    if store is not None and not is_exact:
        return store.make(names[0], weight, bias)
    return dense(weight, bias, is_batch_invariant=weights.is_batch_invariant, memory=weights.memory)


def tied_linear(weights: Weights, name: str, weight: torch.Tensor) -> Linear:
    """A product with a matrix that has been taken for something else."""
    if weights.int8 is None:
        return dense(weight, is_batch_invariant=weights.is_batch_invariant, memory=weights.memory)
    return weights.int8.find(name, *weight.shape) or weights.int8.make(name, weight)
