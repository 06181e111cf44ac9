"""Which form a dense layer of floating-point numbers takes."""

from __future__ import annotations

import torch

from worker_svc.models.float_linear import FloatLinear
from worker_svc.models.packed_linear import PackedLinear


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> FloatLinear | PackedLinear:
    """The fastest form for the weight's device and type; weight [out_features, in_features]."""
    return PackedLinear(weight, bias) if PackedLinear.is_fastest(weight) else FloatLinear(weight, bias)
