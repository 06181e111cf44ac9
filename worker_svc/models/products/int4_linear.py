"""y = x W^T + b with weights of four bits, a scale and a minimum a group, and activations quantised row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product
    from kernels.cpu.products.records import RecordWeight


class Int4Linear:
    """See `Linear`; on a CPU. A row's result is the same alone as beside others. `weight`: of `UINT4` or `INT4`, bias
    float32[out_features].
    """

    def __init__(self, weight: RecordWeight, bias: torch.Tensor | None) -> None:
        # Here, so that a worker with a GPU waits for no compiler of CPU code.
        from kernels.cpu.products.layer_product import Product

        self.weight, self.bias = weight, bias
        self._product = Product.of_records(weight, bias, are_rows_rounded=True)
        self.weight_bytes = self._product.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self.weight.out_features)
        self._product.multiply(out, x)
        return out

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs to multiply by this weight. Raises ValueError where it has not so many inputs."""
        return self._product.compiled(in_features)
