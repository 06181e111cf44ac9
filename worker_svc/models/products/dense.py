"""Which form a dense layer of floating-point numbers takes."""

from __future__ import annotations

import torch

from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.products.packed_linear import packed_linear
from worker_svc.models.products.tiled_linear import TiledLinear


def dense(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
    dtype: torch.dtype | None = None,
) -> CompiledLinear | FloatLinear | TiledLinear:
    """The form for the weight's device; weight [out_features, in_features]. On a CPU a row has the same bits in any
    batch, on a GPU where `is_batch_invariant`. `dtype`: of rows
    (default: the weight's); on a CPU a weight of bfloat16 may be for rows of float32."""
    if weight.device.type == "cpu":
        return packed_linear(weight, bias, dtype)
    return TiledLinear(weight, bias) if is_batch_invariant else FloatLinear(weight, bias)
