"""out = x W^T + bias, with W packed once for streaming (`packed_weight`); for one row as for thousands.

How is in native/products.cpp. Every sum starts with the bias and runs over `in_features` in order, in float32: a row's
result depends neither on the other rows nor on the number of threads nor on how the weight is kept, bit for bit.
"""

from __future__ import annotations

import torch

from kernels.cpu.products.layer_product import Product


def matmul(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias [out_features], with `packed` of `pack` or `pack_pairs`.

    out and x are both float32 or both bfloat16, whose sums are rounded once, and may be strided in their first
    dimension; of a weight of `pack_pairs` they are bfloat16. Raises ValueError for shapes that do not fit, TypeError
    for types.
    """
    size, depth = out.shape[1], x.shape[1]
    if bias is not None and bias.shape != (size,):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit out {tuple(out.shape)}")
    Product.of_floats(packed, bias, size, depth).multiply(out, x)
