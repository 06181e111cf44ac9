"""Products with quantised weights of any format (`kernels.quantized_weight`).

Rows are multiplied as they are, unless the weight says `Inputs.INT8`: every sum starts with the bias and runs over the
weight's columns in order, one fused multiply-add after the other, with the numbers of `QuantizedWeight.dequantized()`.
So a product has the bits of the float32 product with these (with an `order`, of both in that order). Where a format's
author has rows rounded to 8-bit floats they stay as they are, too: that is nearer to the model before it was quantised.

Rows of `Inputs.INT8` are rounded as `reference.int8_linear` does it, by 32 inputs, and multiplied by the same numbers
of the weight: `Product.of_records` has the formula. Weights of floats (E4M3, E2M1) have no such product.
"""

from __future__ import annotations

import torch

from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.quantized_records import pack_quantized
from kernels.int8_weight import pack_int8
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight


def quantized_product(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
) -> Product | None:
    """The product x W^T + bias [N] of float32 and bfloat16 rows; None where only the dequantised weight has one.

    None is what `pack_quantized` refuses, and with rounded rows also a weight of floats.
    """
    bias = None if bias is None else bias.float()
    are_rows_rounded = weight.inputs is Inputs.INT8
    if are_rows_rounded and _is_plain_int8(weight):
        packed = pack_int8(weight.codes.view(torch.int8))
        return Product.of_int8(packed, weight.scale[:, 0].contiguous(), bias, weight.in_features)
    found = pack_quantized(weight)
    if found is None:
        return None
    return Product.of_records(found, bias, order=weight.order, are_rows_rounded=are_rows_rounded)


def _is_plain_int8(weight: QuantizedWeight) -> bool:
    has_one_scale = weight.group >= weight.in_features and weight.zero is None and weight.offset is None
    return weight.numbers is Numbers.INT8 and has_one_scale and weight.order is None
