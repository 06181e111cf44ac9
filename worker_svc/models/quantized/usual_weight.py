"""What most weights of a quantised checkpoint are like: enough to say how large they are, and to make such up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight

_LARGEST = {Numbers.UINT4: 8, Numbers.INT6: 32, Numbers.INT8: 128, Numbers.E4M3: 448, Numbers.E2M1: 6}
_SCALE_BITS = 16
_USUAL_INPUTS = 4096  # of a product, where all share a scale


@dataclass(frozen=True, slots=True)
class UsualWeight:
    """Beside sizes and numbers themselves, all that a `QuantizedWeight` has; weights of four bits have zeros."""

    numbers: Numbers
    group: int | None = None  # None: all inputs
    inputs: Inputs = Inputs.AS_THEY_ARE
    is_of_experts: bool = False  # whether experts alone have such, and attention is plain

    @property
    def bits_per_number(self) -> float:
        """Scales and zeros included."""
        of_group = _SCALE_BITS + (self.numbers.bits if self.numbers is Numbers.UINT4 else 0)
        return self.numbers.bits + of_group / (self.group or _USUAL_INPUTS)

    def made_up(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        """A random one on the generator's device, with numbers in +-1/sqrt(in_features)."""
        group = self.group or in_features
        device, shape = generator.device, (out_features, -(-in_features // group))
        size = 2**self.numbers.bits
        codes = torch.randint(
            0, size, (out_features, in_features), generator=generator, device=device, dtype=torch.uint8
        )
        if self.numbers is Numbers.INT6:
            codes = (codes.view(torch.int8) - 32).view(torch.uint8)
        if self.numbers is Numbers.E4M3:
            codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)  # no NaN
        zero = None
        if self.numbers is Numbers.UINT4:
            zero = torch.full(shape, size // 2, dtype=torch.int16, device=device)
        scale = torch.full(shape, in_features**-0.5 / _LARGEST[self.numbers], device=device)
        return QuantizedWeight(self.numbers, codes, scale, group, zero=zero, inputs=self.inputs)
