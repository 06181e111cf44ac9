"""Weights of eight bits: how they are quantised, and the layout that the products read them in.

    w[o, i] ~ scale[o] * q[o, i],  q = round(w / scale) within -127 .. 127,  scale[o] = max_i |w[o, i]| / 127

A packed weight is uint8, `q + 128`, in the order of use: panels of 16 outputs, in a panel groups of 32 inputs, in a
group 8 quads of inputs, in a quad the outputs one after the other, each with its four inputs:

    [ceil(out / 16), ceil(in / 32), 8, 16, 4]        64 bytes, one vector: 16 outputs of one quad

Of eight inputs in a row the first quad has 0, 2, 4 and 6, the second 1, 3, 5 and 7. So they come out of weights of four
bits (`kernels.cpu.products.records`), and rows are quantised once for both.

Rows and columns that fill the last panel and group up are zeros (128). Knows nothing of activations.
"""

from __future__ import annotations

import torch
from torch.nn import functional

PANEL = 16  # outputs
GROUP = 32  # inputs, which share a scale of the activations
QUAD = 4  # inputs that one instruction multiplies and sums
ZERO = 128
QUAD_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight inputs: of a word of eight 4-bit codes one mask gives the even ones
_PLACES = [QUAD_ORDER.index(i) for i in range(len(QUAD_ORDER))]


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] of any float type to (i8[out, in], scale f32[out]); a channel of zeros has the scale 0."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    # Divided by, not multiplied with the inverse: the largest of a channel is then 127 for certain.
    quantized = (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
    return quantized.to(torch.int8), scale


def pack_int8(quantized: torch.Tensor) -> torch.Tensor:
    """i8[out, in] to the packed layout."""
    num_out, num_in = quantized.shape
    filled = functional.pad(quantized, (0, -num_in % GROUP, 0, -num_out % PANEL))
    ordered = filled.unflatten(1, (-1, len(QUAD_ORDER)))[:, :, QUAD_ORDER].flatten(1)
    quads = ordered.view(torch.uint8).bitwise_xor_(ZERO).view(torch.int32)  # moved as one number each
    panels = quads.unflatten(0, (-1, PANEL)).unflatten(2, (-1, GROUP // QUAD))
    packed: torch.Tensor = panels.permute(0, 2, 3, 1).contiguous().view(torch.uint8).unflatten(3, (PANEL, QUAD))
    return packed


def unpack_int8(packed: torch.Tensor, num_out: int, num_in: int) -> torch.Tensor:
    """The inverse of `pack_int8`: i8[num_out, num_in]."""
    ordered = packed.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
    rows: torch.Tensor = ordered.unflatten(1, (-1, len(QUAD_ORDER)))[:, :, _PLACES].flatten(1)
    return rows[:num_out, :num_in].bitwise_xor(ZERO).view(torch.int8)
