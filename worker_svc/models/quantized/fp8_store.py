"""What `--quantization fp8` makes of a model's products when they are loaded: E4M3 weights, and rows rounded to E4M3.

Nothing is kept for later starts: a GPU quantises faster than a disk is read. Embedding, head and routers stay as they
are, and so do weights that the checkpoint has in few bits.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from kernels.e4m3_weight import quantize_e4m3
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.quantized.quantized_linear import QuantizedLinear, quantized_linear


class Fp8Store:
    """Products of a device whose kernels these are; `may_expand`: see `kernels.gpu.operations.quantized_product`."""

    def __init__(self, kernels: ModuleType, *, may_expand: bool = False) -> None:
        self._quantized_product = partial(kernels.quantized_product, may_expand=may_expand)

    def find(self, name: str, out_features: int, in_features: int) -> None:
        """Nothing was kept."""

    def make(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> CompiledLinear | QuantizedLinear:
        """Quantises a product; its weight [out_features, in_features] is not needed afterwards."""
        product = self._quantized_product(quantize_e4m3(weight), bias)
        assert product is not None, "a scale an output suits every shape"
        return quantized_linear(product, len(weight))

    def finish(self) -> None:
        """Nothing is left to do."""
