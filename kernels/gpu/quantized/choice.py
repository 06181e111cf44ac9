"""Which product multiplies a `QuantizedWeight`."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.gpu.quantized.packed_linear import PackedLinear
from kernels.gpu.quantized.rounded_linear import RoundedLinear
from kernels.quantized_weight import QuantizedWeight


class Product(Protocol):
    """y = x W^T + b; a row has the same bits in any company unless the weight may be expanded. Nothing waits."""

    in_features: int
    out_features: int
    weight_bytes: int  # with the bias

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, N], x [T, K]: rows of adjacent elements at any stride, float32, float16 or bfloat16."""


def quantized_product(
    weight: QuantizedWeight, bias: torch.Tensor | None, *, may_expand: bool = False
) -> Product | None:
    """The product with `weight` and `bias` [N], laid out anew; None: there is none for such a weight, which is to be
    dequantised. Rows are rounded where the format has it so and the card multiplies such rows; else they are not.

    `may_expand`: many rows are multiplied by a weight that is written out in their type for them: several times as
    fast, but a row's bits then depend on how many there are.
    """
    return RoundedLinear.of(weight, bias) or PackedLinear.of(weight, bias, may_expand=may_expand)
