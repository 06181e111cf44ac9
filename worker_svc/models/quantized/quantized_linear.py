"""y = x W^T + b with a weight in few bits, as the device's kernels keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.rows import Rows, TakesRounded

if TYPE_CHECKING:
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
    """See `Linear`; on a GPU."""

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


def quantized_linear(product: QuantizedProduct, out_features: int) -> CompiledLinear | QuantizedLinear:
    """The layer of a product."""
    # Here, as all code for a CPU; the class alone needs no compiler.
    from kernels.cpu.products.layer_product import Product

    return CompiledLinear(product) if isinstance(product, Product) else QuantizedLinear(product, out_features)
