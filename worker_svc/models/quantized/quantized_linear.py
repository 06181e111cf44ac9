"""y = x W^T + b with a weight in few bits, as the device's kernels keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from worker_svc.models.products.rows import Rows, TakesRounded

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product
    from kernels.gpu.quantized.rounding import RoundedRows, Rounding


class QuantizedProduct(Protocol):
    """What `quantized_product` of a device's kernels makes of a weight and a bias."""

    weight_bytes: int  # that both occupy

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, out_features] = x [T, in_features] W^T + bias."""


@runtime_checkable
class RoundingProduct(Protocol):
    """One that takes rows which whoever made them has rounded."""

    rounding: Rounding | None  # as this says; None: it does not take them after all

    def multiply(self, out: torch.Tensor, x: torch.Tensor | RoundedRows) -> None:
        """As `QuantizedProduct`, with either."""


class QuantizedLinear(TakesRounded):
    """See `Linear`."""

    def __init__(self, product: QuantizedProduct, out_features: int) -> None:
        self._product, self._out_features = product, out_features
        self._rounding_product = product if isinstance(product, RoundingProduct) else None
        self._rounding = None if self._rounding_product is None else self._rounding_product.rounding
        self.weight_bytes = product.weight_bytes

    @property
    def rounding(self) -> Rounding | None:
        """See `TakesRounded`."""
        return self._rounding

    def __call__(self, x: Rows) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(len(x), self._out_features)
        if isinstance(x, torch.Tensor):
            self._product.multiply(out, x)
        else:
            assert self._rounding_product is not None
            self._rounding_product.multiply(out, x)
        return out


@runtime_checkable
class CompiledProduct(QuantizedProduct, Protocol):
    """One that compiled code can multiply by itself, of layers that are computed in one call (`FusedLayers`)."""

    def compiled(self, in_features: int) -> Product:
        """What it needs for that. Raises ValueError where the product has not so many inputs."""


class CompiledQuantizedLinear(QuantizedLinear):
    """See `Linear`; with such a product."""

    def __init__(self, product: CompiledProduct, out_features: int) -> None:
        super().__init__(product, out_features)
        self.compiled = product.compiled


def quantized_linear(product: QuantizedProduct, out_features: int) -> QuantizedLinear:
    """The layer of a product."""
    if isinstance(product, CompiledProduct):
        return CompiledQuantizedLinear(product, out_features)
    return QuantizedLinear(product, out_features)
