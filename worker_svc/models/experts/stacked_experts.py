"""Checkpoints that have a product of all experts in one tensor, as gpt-oss does: taken apart into one an expert.

    experts.gate_up_proj          [experts, in, out]           experts.3.gate_up_proj.weight    [out, in]
    experts.gate_up_proj_bias     [experts, out]               experts.3.gate_up_proj.bias      [out]
    experts.gate_up_proj_blocks   [experts, out, groups, 16]   experts.3.gate_up_proj.blocks    [out, 16 groups]
    experts.gate_up_proj_scales   [experts, out, groups]       experts.3.gate_up_proj.scales    [out, groups]

The last two are those of MXFP4. Nothing is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from worker_svc.models.checkpoint.stored_tensor import FileTensor, MadeTensor, StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.style import DecoderStyle

_LEAVES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_DIMENSIONS = {"weight": 3, "bias": 2, "blocks": 4, "scales": 3}


class TransposedTensor:
    """A `StoredTensor` of two dimensions, the other way round."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype, self.num_bytes = tensor.shape[::-1], tensor.dtype, tensor.num_bytes

    def read_into(self, out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]) -> None:
        """See `StoredTensor`; takes as much memory once more."""
        turned = torch.empty(out.shape[::-1], dtype=out.dtype, device=out.device)
        self._tensor.read_into(turned, columns, rows)
        out.copy_(turned.t())


def with_experts_apart(folder: Path, style: DecoderStyle, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A checkpoint's tensors, with those of each expert in the place of those of all. Raises ModelError for one that
    is not of so many experts."""
    if style.experts is None:
        return tensors
    names, found = style.names, dict[str, StoredTensor]()
    of_all, _, _ = names.expert.partition("{}")
    products = "|".join(map(re.escape, (*names.expert_in, names.expert_out)))
    pattern = re.compile(rf"(.*\.{re.escape(of_all)})({products})({'|'.join(_LEAVES)})")
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None or not isinstance(tensor, FileTensor | MadeTensor):
            found[name] = tensor
            continue
        before, product, suffix = match.groups()
        leaf, shape, num_experts = _LEAVES[suffix], tensor.shape, style.experts.num_experts
        if len(shape) != _DIMENSIONS[leaf] or shape[0] != num_experts:
            expected = f"{_DIMENSIONS[leaf]} dimensions, the first of {num_experts} experts"
            raise ModelError(f"{folder}: tensor {name} is {list(shape)}, not of {expected}")
        inner = shape[1:] if leaf in ("weight", "bias") else (shape[1], math.prod(shape[2:]))
        for number in range(num_experts):
            part = tensor.part(number, inner)
            of_expert = f"{before.removesuffix(of_all)}{names.expert.format(number)}{product}.{leaf}"
            found[of_expert] = TransposedTensor(part) if leaf == "weight" else part
    return found
