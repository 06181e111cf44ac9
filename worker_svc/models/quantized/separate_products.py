"""Products of one input whose weights cannot be one: of different formats, or of different orders of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.models.summed import Layer


class SeparateProducts:
    """See `Linear`: the outputs of one product after those of the other."""

    def __init__(self, products: Sequence[Layer]) -> None:
        self.products = list(products)
        self.weight_bytes = sum(product.weight_bytes for product in products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return torch.cat([product(x) for product in self.products], dim=1)
