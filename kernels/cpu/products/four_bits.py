"""Weights quantised to four bits when a model is loaded, for products with rows of eight.

    w[o, k] ~ scale[o, g] code[o, k] + offset[o, g],     g = k // group, both float16: 5 bits a number by groups of 32

Scale and offset come from a search by least squares for each group; native/four_bits.cpp says how, and its source.
"""

from __future__ import annotations

import torch

from kernels.cpu.elements import element_of
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.few_bits_fit import pack_few_bits
from kernels.cpu.products.records import FORMATS, GROUP, Codes, Offset, Records, RecordWeight, Scale

_MOST_GROUP = 256


def quantize_four_bits(weight: torch.Tensor, group: int) -> RecordWeight:
    """A weight [out_features, in_features], float32 or bfloat16; `group`: 32, 64, 96, up to 256 inputs. A group that
    holds NaN, or whose least number float16 does not have, becomes NaN. Raises ValueError for another group."""
    if group % GROUP or not 0 < group <= _MOST_GROUP:
        raise ValueError(f"a group of four bits has a multiple of {GROUP} inputs up to {_MOST_GROUP}, not {group}")
    records = Records(Codes.UINT4, Scale.FLOAT16, Offset.FLOAT16, group)
    shape = records.packed_shape(*weight.shape)
    packed = torch.empty(shape, dtype=torch.uint8)
    places = packed.data_ptr(), element_of(weight), weight.data_ptr()
    library().quantize_four_bits(*places, *weight.stride(), *weight.shape, group, num_threads())
    return RecordWeight(records, packed, *weight.shape)


def find_four_bits(weight: torch.Tensor) -> RecordWeight | None:
    """A weight that was quantised to four bits once as it was then (see `few_bits_fit`); None for any other."""
    if (packed := pack_few_bits(weight, most_bits=4)) is None:
        return None
    return RecordWeight(FORMATS[packed.dtype], packed.view(torch.uint8).flatten(1), *weight.shape)
