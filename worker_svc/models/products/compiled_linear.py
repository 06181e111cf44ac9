"""y = x W^T + b by a product of the compiled library, whatever the weight is kept in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


class CompiledLinear:
    """See `Linear`; on a CPU: a row's result is the same alone as beside others.

    Of bfloat16 rows the sums are float32, too, and rounded once. `FusedLayers` multiplies by `product` itself.
    """

    def __init__(self, product: Product) -> None:
        self.product, self.weight_bytes = product, product.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self.product.out_features)
        self.product.multiply(out, x)
        return out
