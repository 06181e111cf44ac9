"""Weights that are quantised to E4M3 when they are loaded: a scale an output, rows rounded each by its own."""

from __future__ import annotations

import torch

from kernels.quantized_weight import MOST_E4M3, Inputs, Numbers, QuantizedWeight

_NUMBERS_AT_ONCE = 1 << 26  # that are float32 for a moment


def quantize_e4m3(weight: torch.Tensor) -> QuantizedWeight:
    """Of [N, K] in a floating-point type: scale[n] = max |W[n]| / 448, and codes W / scale rounded to the nearest."""
    num_outputs, size = weight.shape
    codes = torch.empty(num_outputs, size, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(num_outputs, 1, dtype=torch.float32, device=weight.device)
    step = max(_NUMBERS_AT_ONCE // max(size, 1), 1)
    for start in range(0, num_outputs, step):
        some = slice(start, start + step)
        part = weight[some].float()
        largest = part.abs().amax(1, keepdim=True)
        scale[some] = torch.where(largest == 0, MOST_E4M3, largest) / MOST_E4M3
        codes[some] = (part / scale[some]).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedWeight(Numbers.E4M3, codes, scale, size, inputs=Inputs.E4M3)
