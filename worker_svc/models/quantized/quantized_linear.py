"""y = x W^T + b with a weight in few bits, as the device's kernels keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


class QuantizedProduct(Protocol):
    """What `quantized_product` of a device's kernels makes of a weight and a bias."""

    weight_bytes: int  # that both occupy

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, out_features] = x [T, in_features] W^T + bias."""


class QuantizedLinear:
    """See `Linear`."""

    def __init__(self, product: QuantizedProduct, out_features: int) -> None:
        self._product, self._out_features = product, out_features
        self.weight_bytes = product.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self._out_features)
        self._product.multiply(out, x)
        return out

    def compiled(self, in_features: int) -> Product:
        """What compiled code on a CPU needs to multiply by this weight. Raises ValueError where it has not so many
        inputs."""
        from kernels.cpu.products.layer_product import Product

        product: object = self._product
        assert isinstance(product, Product), "compiled code is that of a CPU"
        if product.in_features != in_features:
            raise ValueError(f"a weight of {product.in_features} inputs, not {in_features}")
        return product
