"""Float32 weights as files of few bits give them, and packings to hold them against."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from kernels.cpu.products.packed_weight import packed_shape
from kernels.cpu.products.records import PANEL, RecordWeight

KINDS = {  # of GGUF, by the type that such a weight is packed as
    torch.int32: gguf.GGMLQuantizationType.Q4_0,
    torch.uint8: gguf.GGMLQuantizationType.Q4_1,
    torch.int8: gguf.GGMLQuantizationType.Q8_0,
}


def few_bits_weight(dtype: torch.dtype, out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """f32[out_features, in_features] of random numbers."""
    numbers = np.random.default_rng(seed).standard_normal((out_features, in_features), dtype=np.float32)
    return in_few_bits(dtype, torch.from_numpy(numbers))


def in_few_bits(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight, quantised and dequantised by the `gguf` package."""
    stored = gguf.quantize(weight.numpy(), KINDS[dtype])
    return torch.from_numpy(gguf.dequantize(stored, KINDS[dtype]))


def pack_float32(weight: torch.Tensor) -> torch.Tensor:
    """Packed as float32, whatever would suffice."""
    out_features, in_features = weight.shape
    packed = torch.zeros(packed_shape(torch.float32, out_features, in_features))
    for row in range(out_features):
        packed[row // PANEL, :, row % PANEL] = weight[row]
    return packed


def unpack(packed: torch.Tensor, out_features: int) -> torch.Tensor:
    """What the layout of `kernels.cpu.products.records` says, number by number: f32[out_features, in_features]."""
    records = packed.view(torch.uint8).flatten(2).numpy()
    num_scales = 2 if packed.dtype == torch.uint8 else 1
    scales = records[:, :, : num_scales * PANEL * 2].copy().view(np.float16).astype(np.float32)
    rest = records[:, :, num_scales * PANEL * 2 :].copy()
    if packed.dtype == torch.int8:
        integers = rest.view(np.int8).astype(np.float32)
    else:
        words = rest.view(np.uint32).reshape(*rest.shape[:2], 4, 1, PANEL)
        integers = (words >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).astype(np.float32)
        integers -= np.float32(8 if packed.dtype == torch.int32 else 0)
    numbers = scales[:, :, None, :PANEL] * integers.reshape(*rest.shape[:2], 32, PANEL)
    if num_scales == 2:
        numbers = numbers + scales[:, :, None, PANEL:]
    return torch.from_numpy(numbers).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[:out_features]


def unpack_four_bits(weight: RecordWeight) -> torch.Tensor:
    """What the layout of `kernels.cpu.products.records` says, output by output and group by group: f32[out, in]."""
    group, columns = weight.records.group, []
    for panel in weight.packed:
        place, of_panel = 0, []
        for start in range(0, -(-weight.in_features // 32) * 32, group):
            inputs = min(group, -(-weight.in_features // 32) * 32 - start)
            line = panel[place : place + 192].view(torch.float16).float()
            words = panel[place + 192 : place + 192 + inputs * 24].view(torch.int32).view(-1, 1, 48)
            codes = (words >> torch.arange(0, 32, 4).view(8, 1) & 15).reshape(inputs, 48)
            of_panel.append(line[:48] * codes + line[48:])
            place += 192 + inputs * 24
        assert place == len(panel)
        columns.append(torch.cat(of_panel).T)
    return torch.cat(columns)[: weight.out_features, : weight.in_features]
