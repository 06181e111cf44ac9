"""`QuantizedWeight`: its formula, element by element."""

from __future__ import annotations

import pytest
import torch

from kernels.quantized_weight import Numbers, QuantizedWeight


def number_of(numbers: Numbers, code: int) -> float:
    """What a code stands for, from the format's definition."""
    if numbers is Numbers.UINT4:
        return code
    if numbers is Numbers.E4M3:
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        return -size if code >> 7 else size
    if numbers is Numbers.E2M1:
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -size if code >> 3 else size
    return code - 256 * (code >> 7)


@pytest.mark.parametrize("numbers", Numbers)
@pytest.mark.parametrize("has", ["zero", "offset", "neither"])
def test_weights_follow_the_formula(numbers: Numbers, has: str) -> None:
    random = torch.Generator().manual_seed(1)
    count, depth, group = 3, 40, 16
    codes = torch.randint(0, 2**numbers.bits, (count, depth), generator=random, dtype=torch.uint8)
    if numbers is Numbers.INT6:
        codes = (codes.to(torch.int8) - 32).view(torch.uint8)
    if numbers is Numbers.E4M3:
        codes &= 0xF7  # no NaN
    scale = torch.rand(count, 3, generator=random)
    zero = torch.randint(0, 17, (count, 3), generator=random, dtype=torch.int16) if has == "zero" else None
    offset = torch.randn(count, 3, generator=random) if has == "offset" else None
    order = torch.randperm(depth, generator=random)
    found = QuantizedWeight(numbers, codes, scale, group, zero, offset, order).dequantized()
    for n in range(count):
        for j in range(depth):
            g = j // group
            expected = number_of(numbers, int(codes[n, j])) - (0 if zero is None else int(zero[n, g]))
            expected = expected * float(scale[n, g]) + (0 if offset is None else float(offset[n, g]))
            assert float(found[n, order[j]]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_rows_are_those_of_the_whole() -> None:
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (6, 32), generator=random, dtype=torch.uint8)
    zero = torch.randint(0, 16, (6, 2), generator=random, dtype=torch.int16)
    whole = QuantizedWeight(Numbers.UINT4, codes, torch.rand(6, 2, generator=random), 16, zero)
    part = whole.rows(range(2, 5))
    assert part.out_features == 3
    torch.testing.assert_close(part.dequantized(), whole.dequantized()[2:5], rtol=0, atol=0)
