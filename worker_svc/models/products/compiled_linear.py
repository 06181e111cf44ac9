"""Dense layers that compiled code can multiply by itself, of layers that are computed in one call (`FusedLayers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


@runtime_checkable
class CompiledLinear(Protocol):
    """A dense layer on a CPU; see `Linear`."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that weight and bias occupy."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features], contiguous, to [T, out_features]."""

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs. Raises ValueError where the layer has not so many inputs."""
