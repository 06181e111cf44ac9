"""Blocks of a GGUF file as a `QuantizedWeight`, of the kinds that most files have. The code: native/gguf_blocks.cpp."""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.library import library, num_threads
from kernels.quantized_weight import Numbers, QuantizedWeight

# In the order of the library: what codes stand for, inputs that share a scale, whether there are offsets.
_KINDS = {
    "Q4_0": (Numbers.UINT4, 32, False),
    "Q8_0": (Numbers.INT8, 32, False),
    "Q4_K": (Numbers.UINT4, 32, True),
    "Q5_K": (Numbers.INT6, 32, True),
    "Q6_K": (Numbers.INT6, 16, False),
}
_NUMBERS = {"Q4_0": 32, "Q8_0": 32}  # of a block; else 256
_ZERO = 8  # of Q4_0


def read_blocks(kind: str, blocks: np.ndarray, in_features: int) -> QuantizedWeight | None:
    """`blocks` u8[outputs, bytes of a row]; may lie in a file's map. None for another kind."""
    if kind not in _KINDS or blocks.size == 0:
        return None
    numbers, group, has_offset = _KINDS[kind]
    blocks, (out_features, _) = np.ascontiguousarray(blocks), blocks.shape
    codes = torch.empty(out_features, in_features, dtype=torch.uint8)
    scale = torch.empty(out_features, in_features // group)
    offset = torch.empty_like(scale) if has_offset else None
    places = codes.data_ptr(), scale.data_ptr(), 0 if offset is None else offset.data_ptr()
    num_blocks = codes.numel() // _NUMBERS.get(kind, 256)
    library().read_blocks(list(_KINDS).index(kind), blocks.ctypes.data, *places, num_blocks, num_threads())
    zero = torch.full(scale.shape, _ZERO, dtype=torch.int16) if kind == "Q4_0" else None
    return QuantizedWeight(numbers, codes, scale, group, zero=zero, offset=offset)
