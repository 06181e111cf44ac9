"""How a product wants its rows rounded, and rows that are: what a kernel in front of it writes in place of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu.quantized.segments import MOST_ROWS
from kernels.gpu.tiles import cdiv

GROUP = 128  # inputs that share a scale where not all of a row do, and what a row's codes are filled up to


@dataclass(frozen=True, slots=True)
class Rounding:
    """Products that want their rows alike have equal ones; see `rounded_rows` for what becomes of a row."""

    dtype: torch.dtype  # int8 or float8_e4m3fn
    size: int  # inputs, K
    is_by_group: bool = False  # a scale for each 128 inputs, not for all of a row
    scale: float | None = None  # of all rows; None: found row by row
    zero: int = 0  # of all rows of int8 that have such a scale

    @property
    def padded(self) -> int:
        """Codes of a row."""
        return cdiv(self.size, GROUP) * GROUP

    @property
    def given(self) -> tuple[float, float]:
        """Scale and zero as kernels take them; without a scale of all rows, zeros."""
        return self.scale or 0.0, float(self.zero)

    @property
    def form(self) -> tuple[torch.dtype, int, bool, float | None, int]:
        """Fields of a rounding that is equal for any value of scale and zero: what launches are bound for."""
        return self.dtype, self.size, self.is_by_group, None if self.scale is None else 1.0, int(self.zero != 0)

    @property
    def constants(self) -> dict[str, object]:
        """What kernels are compiled for."""
        return {
            "PADDED": self.padded,
            "LARGEST": 127.0 if self.dtype == torch.int8 else 448.0,
            "IS_GIVEN": self.scale is not None,
            "HAS_ZERO": self.zero != 0,
        }

    def empty(self, count: int, like: torch.Tensor) -> RoundedRows:
        """For `count` rows of the type of `like` and on its device."""
        codes = like.new_empty((count, self.padded), dtype=self.dtype)
        scales = None
        if self.scale is None:
            groups = self.padded // GROUP if self.is_by_group else 1
            scales = like.new_empty((groups, scales_stride(count)), dtype=torch.float32)
        return RoundedRows(self, codes, scales, like.dtype)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """T rows; see `rounded_rows` for both tensors."""

    rounding: Rounding
    codes: torch.Tensor
    scales: torch.Tensor | None
    dtype: torch.dtype  # of the rows that were rounded, and of products with them

    def __len__(self) -> int:
        return len(self.codes)

    def new_empty(self, *shape: int) -> torch.Tensor:
        """As the rows that were rounded would make it."""
        return self.codes.new_empty(shape, dtype=self.dtype)


def scales_stride(count: int) -> int:
    """Between scales of one group and the next: products read those of whole tiles of rows."""
    return cdiv(count, MOST_ROWS) * MOST_ROWS
