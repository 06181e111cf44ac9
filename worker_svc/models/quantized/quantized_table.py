"""An embedding that the checkpoint has in few bits: kept as bytes, and expanded row by row as tokens come."""

from __future__ import annotations

import torch

from kernels.quantized_weight import QuantizedWeight
from worker_svc.models.quantized.shaping import some_outputs

BYTES_PER_NUMBER = 1.25  # a byte of its code, and its part of a float32 scale for 16; less with larger groups


class QuantizedTable:
    """Vectors [tokens, width], the same numbers as expanded ones."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        parts = self._weight.codes, self._weight.scale, self._weight.zero, self._weight.offset
        return sum(part.nbytes for part in parts if part is not None)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """f32[rows, width] of token_ids i64[rows]."""
        return some_outputs(self._weight, token_ids).dequantized()
