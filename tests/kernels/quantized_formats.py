"""Random quantised weights of each format, and the exact product of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from tests.kernels.device import DEVICE


@dataclass(frozen=True)
class Format:
    """What sets a format apart."""

    name: str
    numbers: Numbers
    group: int  # 0: a scale an output
    extra: str = ""  # "zero", "offset"
    is_ordered: bool = False
    is_factored: bool = False  # whether scales and offsets are integers times one number for 256 inputs

    def weight(self, num_outputs: int, size: int, seed: int = 0) -> QuantizedWeight:
        """On the device; each code occurs, and scales differ by a factor of four."""
        random = torch.Generator().manual_seed(seed)
        group = self.group or size
        shape = num_outputs, -(-size // group)
        codes = torch.randint(0, 2**self.numbers.bits, (num_outputs, size), generator=random).to(torch.uint8)
        if self.numbers is Numbers.INT6:
            codes = (codes.to(torch.int8) - 32).view(torch.uint8)
        if self.numbers is Numbers.E4M3:
            codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)  # no NaN
        largest = {Numbers.UINT4: 8, Numbers.INT6: 32, Numbers.INT8: 128, Numbers.E4M3: 448, Numbers.E2M1: 6}
        scale = (1 + 3 * torch.rand(shape, generator=random)) / largest[self.numbers] / size**0.5
        offset = torch.randn(shape, generator=random) / size**0.5
        if self.is_factored:
            scale, offset = self._factored(scale, random), self._factored(offset, random)
        zero = torch.randint(0, 17, shape, generator=random).to(torch.int16)
        order = torch.randperm(size, generator=random)
        return QuantizedWeight(
            self.numbers,
            codes.to(DEVICE),
            scale.to(DEVICE),
            group,
            zero.to(DEVICE) if self.extra == "zero" else None,
            offset.to(DEVICE) if self.extra == "offset" else None,
            order.to(DEVICE) if self.is_ordered else None,
        )

    def _factored(self, scale: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Of the same size: a float16 number for 256 inputs times integers of six bits."""
        groups = 256 // self.group
        factor = (scale[:, ::groups] / 32).half().float()
        numbers = torch.randint(-63, 64, scale.shape, generator=random)
        return factor.repeat_interleave(groups, dim=1)[:, : scale.shape[1]] * numbers


FORMATS = [
    Format("AWQ", Numbers.UINT4, 128, "zero"),
    Format("GPTQ in order", Numbers.UINT4, 64, "zero", is_ordered=True),
    Format("w4a16", Numbers.UINT4, 0, "zero"),
    Format("Q4_1", Numbers.UINT4, 32, "offset"),
    Format("Q4_K", Numbers.UINT4, 32, "offset", is_factored=True),
    Format("Q4_0", Numbers.UINT4, 32),
    Format("Q6_K", Numbers.INT6, 16, is_factored=True),
    Format("Q8_0", Numbers.INT8, 32),
    Format("w8a16", Numbers.INT8, 128, "zero"),
    Format("int8", Numbers.INT8, 0),
    Format("fp8", Numbers.E4M3, 0),
    Format("fp8 blocks", Numbers.E4M3, 128),
    Format("MXFP4", Numbers.E2M1, 32),
]


def exact_weight(weight: QuantizedWeight) -> torch.Tensor:
    """f64[N, K]: the formula without a rounding."""
    numbers = weight.values().double()

    def by_column(x: torch.Tensor) -> torch.Tensor:
        return x.double().repeat_interleave(weight.group, dim=1)[:, : weight.in_features]

    if weight.zero is not None:
        numbers -= by_column(weight.zero)
    numbers *= by_column(weight.scale)
    if weight.offset is not None:
        numbers += by_column(weight.offset)
    return numbers if weight.order is None else torch.empty_like(numbers).index_copy_(1, weight.order, numbers)
