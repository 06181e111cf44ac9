"""Weights quantised to eight bits when a model is loaded, as `Product.of_int8` takes them: in one pass what
`quantize_int8` and `pack_int8` of `kernels.int8_weight` make, bit for bit. The code: native/packing.cpp.
"""

from __future__ import annotations

import torch

from kernels.cpu.elements import element_of
from kernels.cpu.library import library, num_threads
from kernels.int8_weight import GROUP, PANEL, QUAD


def quantize_eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out_features, in_features] of float32 or bfloat16, packed, and its scale f32[out_features]; of an
    output that holds NaN the scale is NaN."""
    out_features, in_features = weight.shape
    weight = weight if weight.stride(1) == 1 or in_features == 1 else weight.contiguous()
    shape = -(-out_features // PANEL), -(-in_features // GROUP), GROUP // QUAD, PANEL, QUAD
    packed, scale = torch.empty(shape, dtype=torch.uint8), torch.empty(out_features)
    places = packed.data_ptr(), scale.data_ptr(), element_of(weight), weight.data_ptr(), weight.stride(0)
    library().quantize_eight_bits(*places, out_features, in_features, num_threads())
    return packed, scale
