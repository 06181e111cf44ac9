"""Experts that every token goes to, beside those that are chosen for it (DeepSeekMoE, 2024, arXiv:2401.06066)."""

from __future__ import annotations

import torch

from worker_svc.models.products.summed import Layer


class WithShared:
    """Calls map x [T, hidden] to [T, hidden]: the sum of both; so ranks that have parts of both add up once."""

    def __init__(self, chosen: Layer, shared: Layer) -> None:
        """`shared`: one MLP of all shared experts' neurons."""
        self._chosen, self._shared = chosen, shared

    @property
    def weight_bytes(self) -> int:
        """Of both."""
        return self._chosen.weight_bytes + self._shared.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._chosen(x).add_(self._shared(x))
