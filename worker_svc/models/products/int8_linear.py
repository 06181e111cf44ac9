"""y = x W^T + b with weights of eight bits, a scale an output, and activations quantised row by row as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.select import kernels_for

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


class Int8Linear:
    """See `Linear`; a row's result is the same alone as beside others. `packed` as `kernels.int8_weight` lays it out,
    scale and bias float32[out_features].
    """

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed, self.scale, self.bias = packed, scale, bias
        self.weight_bytes = packed.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)
        self._multiply = kernels_for(packed.device).int8_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self.scale.shape[0])
        self._multiply(out, x, self.packed, self.scale, self.bias)
        return out

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs to multiply by this weight."""
        from kernels.cpu.products.layer_product import Product

        return Product.of_int8(self.packed, self.scale, self.bias, in_features)
