"""Quantised weights as each format of checkpoints has them, of random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight

Make = Callable[[int, int, torch.Generator], QuantizedWeight]


def codes(bits: int, count: int, depth: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (count, depth), generator=random, dtype=torch.uint8)


def scales(count: int, depth: int, group: int, random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Of both signs, as GGUF has them; f32[count, groups], none with more bits than `dtype` has."""
    return (torch.randn(count, -(-depth // group), generator=random) / 50).to(dtype).float()


def awq(count: int, depth: int, random: torch.Generator, group: int = 128) -> QuantizedWeight:
    zero = torch.randint(0, 16, (count, -(-depth // group)), generator=random, dtype=torch.int16)
    scale = scales(count, depth, group, random, torch.float16).abs()
    return QuantizedWeight(Numbers.UINT4, codes(4, count, depth, random), scale, group, zero)


def gptq(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    """Symmetric, with groups of 64 in an order of their own."""
    scale = scales(count, depth, 64, random, torch.float16)
    order = torch.randperm(depth, generator=random)
    return QuantizedWeight(
        Numbers.UINT4, codes(4, count, depth, random), scale, 64, torch.full(scale.shape, 8).short(), order=order
    )


def of_bfloat16(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    """compressed-tensors, some scales too small for float16; zeros up to 16."""
    zero = torch.randint(0, 17, (count, -(-depth // 32)), generator=random, dtype=torch.int16)
    scale = scales(count, depth, 32, random, torch.bfloat16)
    scale[0] *= 2.0**-20
    return QuantizedWeight(Numbers.UINT4, codes(4, count, depth, random), scale, 32, zero)


def per_output(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    """compressed-tensors, symmetric, with scales that need all bits of float32."""
    scale = scales(count, depth, depth, random, torch.float32)
    return QuantizedWeight(
        Numbers.UINT4, codes(4, count, depth, random), scale, depth, torch.full(scale.shape, 8).short()
    )


def q4_1(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale, offset = (scales(count, depth, 32, random, torch.float16) for _ in range(2))
    return QuantizedWeight(Numbers.UINT4, codes(4, count, depth, random), scale, 32, offset=offset)


def factors(count: int, depth: int, group: int, most: int, random: torch.Generator) -> torch.Tensor:
    """Multiples of one float16 number for 256 inputs, up to `most` times it."""
    times = torch.randint(0, most + 1, (count, depth // group), generator=random).float()
    times[:, :: 256 // group] = most
    times[0] = 0
    return times * scales(count, depth, 256, random, torch.float16).repeat_interleave(256 // group, dim=1)


def q4_k(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale, offset = (factors(count, depth, 32, 63, random) for _ in range(2))
    return QuantizedWeight(Numbers.UINT4, codes(4, count, depth, random), scale, 32, offset=offset)


def q5_1(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale, offset = (scales(count, depth, 32, random, torch.float16) for _ in range(2))
    return QuantizedWeight(Numbers.INT6, codes(5, count, depth, random), scale, 32, offset=offset)


def q5_k(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale, offset = (factors(count, depth, 32, 63, random) for _ in range(2))
    return QuantizedWeight(Numbers.INT6, codes(5, count, depth, random), scale, 32, offset=offset)


def q6_k(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    six_bits = (codes(6, count, depth, random).view(torch.int8) - 32).view(torch.uint8)
    return QuantizedWeight(Numbers.INT6, six_bits, factors(count, depth, 16, 127, random), 16)


def q8_0(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale = scales(count, depth, 32, random, torch.float16)
    return QuantizedWeight(Numbers.INT8, codes(8, count, depth, random), scale, 32)


def int8_with_zeros(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    """GPTQ's."""
    zero = torch.randint(-127, 128, (count, -(-depth // 128)), generator=random, dtype=torch.int16)
    scale = scales(count, depth, 128, random, torch.float16).abs()
    return QuantizedWeight(Numbers.INT8, codes(8, count, depth, random), scale, 128, zero)


def int8_by_sixteen(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale = scales(count, depth, 16, random, torch.float32)
    return QuantizedWeight(Numbers.INT8, codes(8, count, depth, random), scale, 16)


def int8_per_output(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    scale = scales(count, depth, depth, random, torch.float32)
    return QuantizedWeight(Numbers.INT8, codes(8, count, depth, random), scale, depth)


def e4m3(count: int, depth: int, random: torch.Generator, group: int = 128) -> QuantizedWeight:
    """With blocks of 128 by 128, and every code but NaN."""
    numbers = codes(8, count, depth, random)
    numbers[(numbers & 0x7F) == 0x7F] = 0x01
    scale = scales(-(-count // 128), depth, group, random, torch.float32).repeat_interleave(128, dim=0)[:count]
    return QuantizedWeight(
        Numbers.E4M3, numbers, scale.contiguous(), group, inputs=Inputs.E4M3_BY_GROUP if group == 128 else Inputs.E4M3
    )


def e2m1(count: int, depth: int, random: torch.Generator) -> QuantizedWeight:
    """MXFP4: scales are powers of two, some below what float16 has."""
    scale = 2.0 ** torch.randint(-40, 3, (count, -(-depth // 32)), generator=random).float()
    return QuantizedWeight(Numbers.E2M1, codes(4, count, depth, random), scale, 32)


# Bits a number takes, of 256 inputs or more; where a format needs multiples of 256 inputs that is said.
FORMATS: dict[str, tuple[Make, float]] = {
    "awq": (awq, 4.1875),
    "awq, groups of 32": (lambda count, depth, random: awq(count, depth, random, 32), 4.75),
    "gptq in an order": (gptq, 4.25),
    "scales of bfloat16": (of_bfloat16, 5.25),
    "four bits per output": (per_output, 4.125),
    "q4_1": (q4_1, 5),
    "q5_1": (q5_1, 9),
    "q8_0": (q8_0, 8.5),
    "int8 with zeros": (int8_with_zeros, 8.1875),
    "int8 by sixteen": (int8_by_sixteen, 10),
    "int8 per output": (int8_per_output, 8.125),
    "e4m3 in blocks": (e4m3, 8.25),
    "e4m3 per output": (lambda count, depth, random: e4m3(count, depth, random, depth), 8.125),
    "e2m1": (e2m1, 5),
}
OF_FACTORS: dict[str, tuple[Make, float]] = {"q4_k": (q4_k, 4.625), "q5_k": (q5_k, 8.625), "q6_k": (q6_k, 8.5625)}
