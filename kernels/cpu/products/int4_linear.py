"""Dense layers with weights of four bits on a CPU, and rows of eight, quantised as they come.

    out[t, o] = bias[o] + sum_g step[t, g] * sum_{i in g} p[t, i] (d[o, g] w[o, i] + m[o, g])

p and step as in `reference.int8_linear`; group g is the inputs 32 g to 32 g + 31. A float32 weight that was
quantised once to four bits (`few_bits`) is scales d, integers w and minima m, and stays what it is: only rows are
rounded, where `int8_linear` rounds weights, too. The code: native/quantized.cpp.
"""

from __future__ import annotations

import torch

from kernels.cpu.products.layer_product import Product


def int4_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias, with `weight` as `few_bits` packs four bits.

    out and x are float32 or bfloat16 and may be strided in their first dimension. Raises ValueError for what does not
    fit.
    """
    Product.of_int4(weight, bias, out.shape[1], x.shape[1]).multiply(out, x)
