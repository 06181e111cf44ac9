"""Weights that were quantised once: float32 numbers that a scale and an integer of few bits say exactly.

Most models that people run on a CPU come from a file of 4 or 8 bits a number, and are float32 again when they are
loaded. Where every group of 32 inputs of every output is still

    w = fl(d q + m)     or     w = d q     with d and m of float16 and q an integer of 4 or 8 bits

(fl: rounded once to float32; a product d q is exact) these are kept in place of w, and become the same float32 numbers
in registers. So a product has the same bits as one of the float32 weight, and reads a seventh to a quarter of the
bytes.

A packed weight is [panels, groups, bytes of a record]: for 48 outputs and 32 inputs their scales d f16[48], then their
minima m f16[48] where the format has them, then the integers q; past the last output all are zeros.

    4 bits     i32[4, 48]     bits 4 i .. 4 i + 3 of word j of an output are q - least of input 8 j + i
    8 bits     i8[32, 48]     q of an input and an output

Which format a tensor has is said by its type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 48  # outputs that lie side by side in every packed weight but those of int8
GROUP = 32  # inputs that share a scale
STEP = 8  # inputs of which one word has 4 bits each


@dataclass(frozen=True)
class FewBits:
    """One format: integers of `bits` bits from `least` on."""

    bits: int
    least: int
    has_minimum: bool

    @property
    def most(self) -> int:
        """The largest integer."""
        return self.least + (1 << self.bits) - 1

    @property
    def integers_offset(self) -> int:
        """Bytes of a record before its integers."""
        return PANEL * 2 * (1 + self.has_minimum)

    @property
    def record_bytes(self) -> int:
        """Bytes of 48 outputs by 32 inputs."""
        return self.integers_offset + PANEL * GROUP * self.bits // 8


# By the type of a packed tensor, in the order in which they are tried. Q4_0, Q4_1 and Q8_0 of GGUF are such numbers.
FORMATS = {
    torch.int32: FewBits(bits=4, least=-8, has_minimum=False),
    torch.uint8: FewBits(bits=4, least=0, has_minimum=True),
    torch.int8: FewBits(bits=8, least=-128, has_minimum=False),
}
