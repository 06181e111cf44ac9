"""Weights packed once for streaming, in the fewest bytes that give every number back bit for bit.

    packed [panels, in_features, 48]     packed[p, k, c] = W[48 p + c, k], zeros past the last row of W

A weight that was quantised once is kept as it was then, in records of 48 outputs and 32 inputs (`records`); one whose
numbers all fit bfloat16, as those of most checkpoints do, as bfloat16. The type of a packed tensor says which it is.

For rows of bfloat16 and a processor that multiplies pairs of such numbers, two inputs are one element (`pack_pairs`):

    packed [panels, in_features / 2, 48]     u32: W[48 p + c, 2 k], and above it W[48 p + c, 2 k + 1]
"""

from __future__ import annotations

import torch

from kernels.cpu.products.few_bits_fit import pack_few_bits
from kernels.cpu.products.records import FORMATS, GROUP, PANEL

# `Kind` of native/products.h, by the type of a packed tensor.
KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    **dict.fromkeys(FORMATS, 2),
    torch.uint32: 3,
}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out_features, in_features], float32 or bfloat16, packed; its type and shape: see above."""
    if weight.dtype == torch.float32:
        if (packed := pack_few_bits(weight)) is not None:
            return packed
        # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
        if _fits_bfloat16(weight[:1]) and _fits_bfloat16(weight):
            weight = weight.to(torch.bfloat16)
    return _in_panels(weight)


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out_features, in_features] bfloat16, `in_features` even, as u32[panels, in_features / 2, 48]."""
    return _in_panels(weight.contiguous().view(torch.int32)).view(torch.uint32)


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    out_features, in_features = weight.shape
    packed = torch.zeros(-(-out_features // PANEL), in_features, PANEL, dtype=weight.dtype)
    whole = out_features // PANEL
    packed[:whole] = weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if whole < len(packed):
        packed[whole, :, : out_features - whole * PANEL] = weight[whole * PANEL :].t()
    return packed


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


def kind_of_packed(packed: torch.Tensor) -> int:
    """How the library calls the way in which a weight is packed. Raises TypeError for what `pack` never gives."""
    try:
        return KINDS[packed.dtype]
    except KeyError:
        raise TypeError(f"no weight is packed as {packed.dtype}") from None


def _fits_bfloat16(weight: torch.Tensor) -> bool:
    return not (weight.view(torch.int32) & 0xFFFF).any()
