"""What each rank computes in part: y = the sum over ranks of layer(x)."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch

from worker_svc.parallel.ranks import Ranks


class Layer(Protocol):
    """Part of a decoder's layer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] to [T, outputs]."""


L = TypeVar("L", bound=Layer)


class Summed(Generic[L]):
    """Calls map as those of the layer do. A bias is to be on one rank alone."""

    def __init__(self, layer: L, ranks: Ranks) -> None:
        self.layer, self._ranks = layer, ranks

    @property
    def weight_bytes(self) -> int:
        """Of this rank's part."""
        return self.layer.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output of this x, of which every rank has another part or all."""
        return self._ranks.add_up(self.layer(x))


def summed(layer: L, ranks: Ranks) -> L | Summed[L]:
    """The layer itself where one rank has all of it."""
    return layer if ranks.size == 1 else Summed(layer, ranks)
