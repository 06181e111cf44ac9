"""Products of one input whose weights cannot be one: of different formats, or of different orders of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.summed import Layer


def side_by_side_products(products: Sequence[Layer]) -> Layer:
    """The outputs of one product after those of the other: as one product where compiled code can multiply all of them
    at once, with the bits of each."""
    if len(products) == 1:
        return products[0]
    compiled = [layer.product for layer in products if isinstance(layer, CompiledLinear)]
    if len(compiled) == len(products):
        joined = type(compiled[0]).side_by_side(compiled)
        if joined is not None:
            return CompiledLinear(joined)
    return SeparateProducts(products)


class SeparateProducts:
    """See `Linear`: the outputs of one product after those of the other."""

    def __init__(self, products: Sequence[Layer]) -> None:
        self.products = list(products)
        self.weight_bytes = sum(product.weight_bytes for product in products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return torch.cat([product(x) for product in self.products], dim=1)
