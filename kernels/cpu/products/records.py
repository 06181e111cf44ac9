"""Weights of few bits: one form of records for every format, which say exactly what float32 numbers they are.

    W[o, k] = fl(scale[o, g] * code[o, k] + offset[o, g]),     g = k // group

(fl: rounded once to float32.) A weight is [panels of 48 outputs, bytes]; past the last output all are zeros. A panel is
a record for each group of inputs, one after the other, the last of what is left:

    f16[48], f16[48]    of factors only: what the scales, and the offsets, of the groups of 256 inputs are multiples of
    scale [48]          float16, float32, or a factor as a byte with sign; a line for each group of the record
    offset [48]         nothing; float16; a zero z as a byte, for the offset -scale z; or a factor as a byte
    codes               4 bits: i32[inputs / 8, 48], input 8 j + i has bits 4 i .. 4 i + 3 of word j
                        8 bits: i8[inputs, 48]
                        for rounded rows, 8 bits: u8[inputs / 4, 48, 4], code + 128, of eight inputs first those of
                        even number, then those of odd; 6 bits: u8[inputs / 16, 3, 48, 4], code + 32 of the first
                        three of four such quads, and above each two bits of the fourth, its highest above the first

A record of factors has 256 inputs and the lines of several groups, any other has one group. So GGUF's Q4_0 takes 4.5
bits a number, Q4_1 5, Q4_K 4.63, Q8_0 8.5, Q5_K 8.63, Q6_K 8.56 (the codes of the last two as bytes: five or six bits
would be put together again by more instructions than the bytes cost that they save), and AWQ and GPTQ with groups of
128 4.19. native/records.h has the same in C++.

Products multiply rows as they are by these very numbers (native/few_bits.cpp), or rows that are rounded to 8 bits by
the codes, as integers (native/rounded_records.cpp). The latter take codes of 5 and 6 bits in 6: there are few
instructions for each, and Q6_K takes 6.56 bits a number, Q5_K 6.63.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

PANEL = 48  # outputs that lie side by side in every packed weight but those of int8
STEP = 8  # inputs of which one word has 4 bits each
GROUP = 32  # inputs: a group of four bits is a multiple, and so are a weight's inputs
INPUTS_OF_FACTORS = 256


class Codes(IntEnum):
    """What a code stands for; `Codes` of native/products.h."""

    UINT4 = 0  # 0 .. 15
    INT4 = 1  # -8 .. 7, as 0 .. 15
    E2M1 = 2  # twice the number of `quantized_weight.Numbers.E2M1`: scales are half of what they were
    INT8 = 3
    E4M3 = 4  # the 256th of the number: scales are 256 times what they were
    INT6 = 5  # -32 .. 31; of rounded rows
    QUADS = 6  # those of INT8, four inputs side by side; of rounded rows

    @property
    def bits(self) -> int:
        """Of a code."""
        return (4, 4, 4, 8, 8, 6, 8)[self]

    @property
    def are_for_rounded_rows(self) -> bool:
        """Whether rows that are rounded can be multiplied by such codes."""
        return self in (Codes.UINT4, Codes.INT4, Codes.INT6, Codes.QUADS)

    @property
    def are_for_plain_rows(self) -> bool:
        """Whether rows that are not rounded can be."""
        return self not in (Codes.INT6, Codes.QUADS)


class Scale(IntEnum):
    """How a record has its scales; `Scale` of native/products.h."""

    FLOAT16 = 0
    FLOAT32 = 1
    FACTOR = 2


class Offset(IntEnum):
    """How a record has its offsets; `Offset` of native/products.h."""

    NOTHING = 0
    FLOAT16 = 1
    ZERO = 2
    FACTOR = 3


@dataclass(frozen=True, slots=True)
class Records:
    """One format. Groups of four bits have a multiple of 32 inputs, of eight bits of 16."""

    codes: Codes
    scale: Scale
    offset: Offset
    group: int

    @property
    def inputs(self) -> int:
        """Of a whole record."""
        return INPUTS_OF_FACTORS if self.scale is Scale.FACTOR else self.group

    @property
    def head_bytes(self) -> int:
        """Before the first line."""
        return PANEL * 2 * ((self.scale is Scale.FACTOR) + (self.offset is Offset.FACTOR))

    @property
    def line_bytes(self) -> int:
        """Of what a group has beside its codes."""
        return PANEL * ((2, 4, 1)[self.scale] + (0, 2, 1, 1)[self.offset])

    def record_bytes(self, inputs: int) -> int:
        """Of the record of so many inputs."""
        return self.head_bytes + self.inputs // self.group * self.line_bytes + PANEL * inputs * self.codes.bits // 8

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Of a weight of so many inputs, rounded up to whole groups of 32."""
        whole, rest = divmod(-(-in_features // GROUP) * GROUP, self.inputs)
        size = whole * self.record_bytes(self.inputs) + (self.record_bytes(rest) if rest else 0)
        return -(-out_features // PANEL), size


@dataclass(frozen=True, slots=True)
class RecordWeight:
    """A weight [out_features, in_features] in records."""

    records: Records
    packed: torch.Tensor  # u8[panels, bytes], contiguous
    out_features: int
    in_features: int

    def __post_init__(self) -> None:
        """Raises ValueError for a tensor that is not of this size and format."""
        expected = self.records.packed_shape(self.out_features, self.in_features)
        fits = self.packed.shape == expected and self.packed.dtype == torch.uint8 and self.packed.is_contiguous()
        if not fits:
            sizes = f"{tuple(self.packed.shape)} of {self.packed.dtype}"
            raise ValueError(f"weight {sizes} is not in {self.records} for {self.out_features} x {self.in_features}")


# What `few_bits_fit` finds in float32 numbers, by the type that tells it from other packed weights, in the order in
# which they are tried: Q4_0, Q4_1 and Q8_0 of GGUF are such numbers.
FORMATS = {
    torch.int32: Records(Codes.INT4, Scale.FLOAT16, Offset.NOTHING, GROUP),
    torch.uint8: Records(Codes.UINT4, Scale.FLOAT16, Offset.FLOAT16, GROUP),
    torch.int8: Records(Codes.INT8, Scale.FLOAT16, Offset.NOTHING, GROUP),
}
