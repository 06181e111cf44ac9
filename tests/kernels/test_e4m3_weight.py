"""E4M3 weights made at load: each output's largest number is 448, and all others the nearest that there are."""

from __future__ import annotations

import pytest
import torch

from kernels import e4m3_weight
from kernels.e4m3_weight import quantize_e4m3
from kernels.quantized_weight import Inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_the_nearest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e4m3_weight, "_NUMBERS_AT_ONCE", 200)  # outputs in pieces
    weight = torch.randn(11, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[4] = 0
    found = quantize_e4m3(weight)
    assert found.inputs is Inputs.E4M3 and found.group == 70 and found.scale.shape == (11, 1)
    largest = weight.float().abs().amax(1, keepdim=True)
    values, numbers = found.dequantized(), found.values()
    torch.testing.assert_close(values.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)
    assert not values[4].any()
    # Half of a step: numbers have three bits behind the first, or lie 2^-9 apart.
    step = torch.maximum(2.0 ** (numbers.abs().clamp_min(2**-6).log2().floor() - 3), torch.tensor(2.0**-9))
    assert bool(((weight.float() - values).abs() <= found.scale * step * 0.501).all())
