"""Parts of quantised weights, and weights put together: what stays exactly the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.quantized_weight import QuantizedWeight
from worker_svc.models.errors import ModelError

_LEAST_GROUP = 16  # with fewer inputs to a scale, scales would outweigh the numbers


def part_of_groups(name: str, group: int, in_features: int, columns: range) -> tuple[int, list[int]]:
    """Inputs that share a scale among `columns` alone, and which of the whole weight's groups each such group is in.

    Where a part begins or ends within a group, groups become smaller, so that all edges are edges of groups. Raises
    ModelError where they would become too small.
    """
    if len(columns) == in_features:
        return group, list(range(-(-in_features // group)))
    if columns.start // group == (columns.stop - 1) // group:
        smaller = len(columns)
    else:
        smaller = group if columns.start % group == 0 else math.gcd(group, columns.start, len(columns))
        if smaller < _LEAST_GROUP:
            asked = f"inputs {columns.start} to {columns.stop - 1} of {in_features}"
            raise ModelError(f"{name}: {asked} cannot be had alone: they share scales in groups of {group}")
    return smaller, [start // group for start in range(columns.start, columns.stop, smaller)]


def some_inputs(name: str, weight: QuantizedWeight, columns: range) -> QuantizedWeight:
    """The weight for these inputs alone; one whose inputs have no order of their own. Raises ModelError."""
    if len(columns) == weight.in_features:
        return weight
    group, groups = part_of_groups(name, weight.group, weight.in_features, columns)
    index = torch.tensor(groups, device=weight.codes.device)
    return replace(
        weight,
        codes=weight.codes[:, columns.start : columns.stop].contiguous(),
        scale=weight.scale[:, index],
        group=group,
        zero=None if weight.zero is None else weight.zero[:, index],
        offset=None if weight.offset is None else weight.offset[:, index],
    )


def some_outputs(weight: QuantizedWeight, index: torch.Tensor) -> QuantizedWeight:
    """The outputs of these numbers i64[n], in this order."""
    return replace(
        weight,
        codes=weight.codes[index],
        scale=weight.scale[index],
        zero=None if weight.zero is None else weight.zero[index],
        offset=None if weight.offset is None else weight.offset[index],
    )


def fit_together(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether both can be one weight, the outputs of the one behind those of the other."""
    return (
        one.numbers is other.numbers
        and one.group == other.group
        and one.in_features == other.in_features
        and (one.zero is None) == (other.zero is None)
        and (one.offset is None) == (other.offset is None)
        and one.inputs is other.inputs
        and (one.input_scale is None) == (other.input_scale is None)
        and one.input_zero == other.input_zero
        and (one.input_zero == 0 or one.input_scale == other.input_scale)
        and (one.order is None) == (other.order is None)
        and (one.order is None or other.order is None or torch.equal(one.order, other.order))
    )


def side_by_side(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights that `fit_together` as one. Rows that all are given are rounded by the largest of their scales."""
    first = weights[0]
    if len(weights) == 1:
        return first
    scales = [each.input_scale for each in weights if each.input_scale is not None]
    return replace(
        first,
        codes=torch.cat([each.codes for each in weights]),
        scale=torch.cat([each.scale for each in weights]),
        zero=_all([each.zero for each in weights]),
        offset=None
        if first.offset is None
        else torch.cat([each.offset for each in weights if each.offset is not None]),
        input_scale=max(scales) if scales else None,
    )


def _all(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
