"""Products of the compiled library by the signatures of their oracles: each call checks its weight anew."""

from __future__ import annotations

import torch

from kernels.cpu.products.layer_product import Product


def matmul(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias, with `packed` of `pack` or `pack_pairs`."""
    Product.of_floats(packed, bias, out.shape[1], x.shape[1]).multiply(out, x)


def int8_linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `kernels.oracles.reference.int8_linear`."""
    Product.of_int8(weight, scale, bias, x.shape[1]).multiply(out, x)
