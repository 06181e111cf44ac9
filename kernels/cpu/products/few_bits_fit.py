"""Whether a float32 weight is one of few bits (see `few_bits`), found from its numbers alone, and its packed form.

The code: native/few_bits_fit.cpp. Nothing is lost wherever the numbers came from; a tensor fits whole or not at all.
"""

from __future__ import annotations

import torch

from kernels.cpu.library import library, num_threads
from kernels.cpu.products.few_bits import FORMATS, GROUP, PANEL, FewBits


def pack_few_bits(weight: torch.Tensor, most_bits: int = 8) -> torch.Tensor | None:
    """`weight` f32[out_features, in_features] as [panels, groups, record] of a format's type; None if none fits."""
    if weight.shape[1] % GROUP or 0 in weight.shape:
        return None
    for dtype, few in FORMATS.items():
        if few.bits > most_bits:
            continue
        # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
        if _packed(weight[:1], dtype, few) is not None and (packed := _packed(weight, dtype, few)) is not None:
            return packed
    return None


def _packed(weight: torch.Tensor, dtype: torch.dtype, few: FewBits) -> torch.Tensor | None:
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed = torch.empty(num_panels, in_features // GROUP, few.record_bytes // dtype.itemsize, dtype=dtype)
    format_ = few.bits, few.least, few.has_minimum
    addresses = packed.data_ptr(), weight.data_ptr()
    fits = library().pack_few_bits(*addresses, *weight.stride(), out_features, in_features, *format_, num_threads())
    return packed if fits else None
