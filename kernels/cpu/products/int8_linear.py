"""Dense layers with weights of eight bits on a CPU: formula and arguments as in `reference.int8_linear`.

Sources: Dettmers et al. 2022 (arXiv:2208.07339) for a scale an output channel and one a row of activations; Yao et al.
2022 (arXiv:2206.01861) for finer ones within a row. Packed weights: `kernels.int8_weight`; code: native/quantized.cpp.
"""

from __future__ import annotations

import torch

from kernels.cpu.products.layer_product import Product


def int8_linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `kernels.oracles.reference.int8_linear`. out and x are float32 or bfloat16 and may be strided in their first
    dimension; weight, scale and bias are contiguous, the last two float32.
    """
    Product.of_int8(weight, scale, bias, x.shape[1]).multiply(out, x)
