"""y = x W^T + b with weights kept in the four bits that they once had, and activations quantised row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.select import kernels_for

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


class Int4Linear:
    """See `Linear`, of float32; a row's result is the same alone as beside others. `packed` is what `pack` gives, bias
    float32[out_features].
    """

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> None:
        self.packed, self.bias = packed, bias
        self.weight_bytes = packed.nbytes + (0 if bias is None else bias.nbytes)
        self._out_features = out_features
        self._multiply = kernels_for(packed.device).int4_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self._out_features)
        self._multiply(out, x, self.packed, self.bias)
        return out

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs to multiply by this weight."""
        from kernels.cpu.products.layer_product import Product

        return Product.of_int4(self.packed, self.bias, self._out_features, in_features)

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor | None:
        """A weight [out_features, in_features] as `products.few_bits` lays four bits out; None where it would be
        another then."""
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            return None
        from kernels.cpu.products.few_bits_fit import pack_few_bits

        return pack_few_bits(weight, most_bits=4)

    @staticmethod
    def is_packed(packed: torch.Tensor, out_features: int, in_features: int) -> bool:
        """Whether `pack` gives such a tensor for a weight of this size."""
        from kernels.cpu.products.layer_product import is_int4_weight

        return is_int4_weight(packed, out_features, in_features)
