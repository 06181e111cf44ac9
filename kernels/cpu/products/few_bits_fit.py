"""Whether a float32 weight is one of few bits (see `records`), found from its numbers alone, and its packed form.

The code: native/few_bits_fit.cpp. Nothing is lost wherever the numbers came from; a tensor fits whole or not at all.
"""

from __future__ import annotations

import torch

from kernels.cpu.elements import element_of
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.records import FORMATS, GROUP, Codes, Offset, Records

_LEAST = {Codes.UINT4: 0, Codes.INT4: -8, Codes.INT8: -128}


def pack_few_bits(weight: torch.Tensor, most_bits: int = 8) -> torch.Tensor | None:
    """`weight` [out_features, in_features], float32 or bfloat16, as [panels, records, record] of a format's type; None
    if none fits."""
    if weight.shape[1] % GROUP or 0 in weight.shape:
        return None
    for dtype, records in FORMATS.items():
        if records.codes.bits > most_bits:
            continue
        # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
        if _packed(weight[:1], dtype, records) is None:
            continue
        if (packed := _packed(weight, dtype, records)) is not None:
            return packed
    return None


def _packed(weight: torch.Tensor, dtype: torch.dtype, records: Records) -> torch.Tensor | None:
    out_features, in_features = weight.shape
    shape = records.packed_shape(out_features, in_features)
    packed = torch.empty(shape, dtype=torch.uint8).view(dtype)
    format_ = records.codes.bits, _LEAST[records.codes], records.offset is Offset.FLOAT16
    places = packed.data_ptr(), element_of(weight), weight.data_ptr()
    fits = library().pack_few_bits(*places, *weight.stride(), out_features, in_features, *format_, num_threads())
    return packed.unflatten(1, (in_features // GROUP, -1)) if fits else None
