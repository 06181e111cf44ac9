"""Weights packed once for streaming, in the fewest bytes that give every number back bit for bit.

    packed [panels, in_features, 48]     packed[p, k, c] = W[48 p + c, k], zeros past the last row of W

A weight that was quantised once is kept as it was then, in records of 48 outputs and 32 inputs (`records`); one whose
numbers all fit bfloat16, as those of most checkpoints do, as bfloat16. The type of a packed tensor says which it is.

For rows of bfloat16 and a processor that multiplies pairs of such numbers, two inputs are one element (`pack_pairs`):

    packed [panels, in_features / 2, 48]     u32: W[48 p + c, 2 k], and above it W[48 p + c, 2 k + 1]
"""

from __future__ import annotations

from enum import IntEnum

import torch

from kernels.cpu.elements import element_of
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.few_bits_fit import pack_few_bits
from kernels.cpu.products.records import FORMATS, GROUP, PANEL


class Kind(IntEnum):
    """How a weight is kept; `Kind` of native/products.h. Of the last two rows are rounded as they come."""

    FLOAT32 = 0
    BFLOAT16 = 1
    RECORDS = 2
    PAIRS = 3
    INT8 = 4
    ROUNDED_RECORDS = 5


# By the type of a packed tensor.
KINDS = {
    torch.float32: Kind.FLOAT32,
    torch.bfloat16: Kind.BFLOAT16,
    **dict.fromkeys(FORMATS, Kind.RECORDS),
    torch.uint32: Kind.PAIRS,
}


def pack(weight: torch.Tensor, rows: torch.dtype | None = None) -> torch.Tensor:
    """`weight` [out_features, in_features], float32 or bfloat16, packed; its type and shape: see above.

    `rows`: the type of those that it is for (default: the weight's); few bits are looked for where that is float32.
    """
    packed: torch.Tensor | None = None
    if (rows or weight.dtype) == torch.float32:
        packed = pack_few_bits(weight)
    # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
    if packed is None and (weight.dtype == torch.bfloat16 or _in_panels(weight[:1], torch.bfloat16) is not None):
        packed = _in_panels(weight, torch.bfloat16)
    if packed is None:
        packed = _in_panels(weight, torch.float32)
    assert packed is not None
    return packed


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out_features, in_features] bfloat16, `in_features` even, as u32[panels, in_features / 2, 48]."""
    weight = weight.contiguous()
    if weight.storage_offset() % 2 or weight.stride(0) % 2:  # no float32 begins there; a single row has any stride
        weight = weight.clone(memory_format=torch.contiguous_format)
    pairs = _in_panels(weight.view(torch.float32), torch.float32)
    assert pairs is not None
    return pairs.view(torch.uint32)


def _in_panels(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """As numbers of `dtype`, bit for bit; None where float32 does not fit bfloat16."""
    out_features, in_features = weight.shape
    weight = weight if weight.stride(1) == 1 or in_features == 1 else weight.contiguous()
    shape = packed_shape(dtype, out_features, in_features)
    packed = torch.empty(shape, dtype=dtype)
    narrows = dtype == torch.bfloat16 and weight.dtype == torch.float32
    places = element_of(weight), weight.data_ptr(), weight.stride(0)
    fits = library().pack_panels(packed.data_ptr(), narrows, *places, out_features, in_features, num_threads())
    return packed if fits else None


def packed_shape(dtype: torch.dtype, out_features: int, in_features: int) -> tuple[int, ...]:
    """Of a weight packed as `dtype`; for uint32 `in_features` are pairs. Few bits come in whole groups of inputs, other
    `in_features` give no shape."""
    num_panels = -(-out_features // PANEL)
    records = FORMATS.get(dtype)
    if records is None:
        return num_panels, in_features, PANEL
    if in_features % GROUP:
        return ()
    return num_panels, in_features // GROUP, records.record_bytes(GROUP) // dtype.itemsize


def kind_of_packed(packed: torch.Tensor) -> Kind:
    """How a weight of `pack` or `pack_pairs` is kept. Raises TypeError for what `pack` never gives."""
    try:
        return KINDS[packed.dtype]
    except KeyError:
        raise TypeError(f"no weight is packed as {packed.dtype}") from None
