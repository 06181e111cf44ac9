"""Rows between a norm or a gate and the product behind it: numbers, or, on a GPU, codes as that product rounds them.

Products of some quantised formats round their rows before they multiply them. Whoever makes the rows for such a product
alone can round them at once, to the same bits, and no others are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from worker_svc.models.products.summed import Layer

if TYPE_CHECKING:
    from kernels.gpu.quantized.rounding import RoundedRows, Rounding

Rows: TypeAlias = "torch.Tensor | RoundedRows"


class TakesRounded(ABC):
    """A layer that may take rounded rows as well."""

    @property
    @abstractmethod
    def rounding(self) -> Rounding | None:
        """How its rows may be rounded; None: they may not be."""

    @abstractmethod
    def __call__(self, x: Rows) -> torch.Tensor:
        """As other layers, or with rows that are rounded so."""


def rounding_of(layers: Sequence[Layer]) -> Rounding | None:
    """What all of these want alike; None where one of them needs the numbers, as where an adapter adds to it."""
    wanted = [layer.rounding if isinstance(layer, TakesRounded) else None for layer in layers]
    return wanted[0] if all(each == wanted[0] for each in wanted[1:]) else None


def applied(layer: Layer, rows: Rows) -> torch.Tensor:
    """layer(rows), which are numbers or what `rounding_of` says of it."""
    if isinstance(layer, TakesRounded):
        return layer(rows)
    assert isinstance(rows, torch.Tensor)
    return layer(rows)
