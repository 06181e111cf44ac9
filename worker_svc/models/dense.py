"""Which form a dense layer of floating-point numbers takes."""

from __future__ import annotations

import torch

from worker_svc.huge_pages import HugePages
from worker_svc.models.float_linear import FloatLinear
from worker_svc.models.packed_linear import PackedLinear
from worker_svc.models.tiled_linear import TiledLinear


def dense(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
    memory: HugePages | None = None,
) -> FloatLinear | PackedLinear | TiledLinear:
    """The fastest form for the weight's device and type, of those that give a row the same bits in any company where
    `is_batch_invariant`; weight [out_features, in_features]. `memory`: where a packed form is kept; None: anywhere."""
    if weight.device.type != "cpu":
        return TiledLinear(weight, bias) if is_batch_invariant else FloatLinear(weight, bias)
    if is_batch_invariant or PackedLinear.is_fastest(weight):
        return PackedLinear(weight, bias, memory)
    return FloatLinear(weight, bias)
