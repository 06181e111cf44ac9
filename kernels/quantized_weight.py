"""A quantised weight as any format of checkpoints gives it: numbers of few bits, and what groups of them are scaled by.

    W[n, k] = scale[n, g] * (number[n, k] - zero[n, g]) + offset[n, g],     g = k // group

This is what readers of checkpoints make and what the kernels of a device lay out anew for themselves; nothing is
multiplied in this form. A weight has a zero or an offset or neither, never both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch


class Numbers(Enum):
    """What a code stands for; how many bits it needs."""

    UINT4 = "uint4"  # 0 .. 15
    INT6 = "int6"  # -32 .. 31, as a byte with sign
    INT8 = "int8"  # as a byte with sign
    E4M3 = "e4m3"  # an 8-bit float: torch.float8_e4m3fn
    E2M1 = "e2m1"  # a 4-bit float: 0, .5, 1, 1.5, 2, 3, 4, 6, and from code 8 on the same below zero

    @property
    def bits(self) -> int:
        """Of a number."""
        return {"uint4": 4, "int6": 6, "int8": 8, "e4m3": 8, "e2m1": 4}[self.value]


class Inputs(Enum):
    """What a format's author has the rows rounded to before they are multiplied."""

    AS_THEY_ARE = "as they are"
    INT8 = "int8"  # per row, or by `input_scale`
    E4M3 = "e4m3"  # per row, or by `input_scale`
    E4M3_BY_GROUP = "e4m3 by group"  # per row and 128 inputs


E2M1_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MOST_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One product's weight; tensors are contiguous and on one device. N outputs, K inputs, G = ceil(K / group)."""

    numbers: Numbers
    codes: torch.Tensor  # u8[N, K], a code each
    scale: torch.Tensor  # f32[N, G]
    group: int  # inputs that share a scale; K: a scale an output
    zero: torch.Tensor | None = None  # i16[N, G]
    offset: torch.Tensor | None = None  # f32[N, G]
    order: torch.Tensor | None = None  # i64[K]: column j is for input order[j] of a row; None: as they come
    inputs: Inputs = Inputs.AS_THEY_ARE
    input_scale: float | None = None  # of all rows; None: found row by row
    input_zero: int = 0  # of all rows of INT8, as their codes count, where they have a scale: (code - zero) * scale

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes.shape[1]

    def values(self) -> torch.Tensor:
        """What the codes stand for: f32[N, K]."""
        if self.numbers is Numbers.UINT4:
            return self.codes.float()
        if self.numbers is Numbers.E4M3:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.numbers is Numbers.E2M1:
            table = torch.cat([E2M1_NUMBERS, -E2M1_NUMBERS]).to(self.codes.device)
            return table[self.codes.long()]
        return self.codes.view(torch.int8).float()

    def dequantized(self) -> torch.Tensor:
        """W f32[N, K], its columns in the order of a row's inputs; every step is rounded to float32."""
        numbers = self.values()
        if self.zero is not None:
            numbers -= self._by_column(self.zero.float())
        weight = numbers.mul_(self._by_column(self.scale))
        if self.offset is not None:
            weight += self._by_column(self.offset)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def rows(self, outputs: range) -> QuantizedWeight:
        """Some of the outputs."""
        part = slice(outputs.start, outputs.stop)
        return replace(
            self,
            codes=self.codes[part].contiguous(),
            scale=self.scale[part].contiguous(),
            zero=None if self.zero is None else self.zero[part].contiguous(),
            offset=None if self.offset is None else self.offset[part].contiguous(),
        )

    def _by_column(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, dim=1)[:, : self.in_features]
