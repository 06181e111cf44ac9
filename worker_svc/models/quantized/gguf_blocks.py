"""Matrices of a GGUF file as it has them: blocks of 32 or 256 inputs of an output, with scales of their own.

    Q4_0  d f16, 16 bytes q                                     d (q - 8)
    Q4_1  d, m f16, 16 bytes q                                  d q + m
    Q5_0  d f16, 32 fifth bits, 16 bytes q                      d (q - 16)
    Q5_1  d, m f16, 32 fifth bits, 16 bytes q                   d q + m
    Q8_0  d f16, 32 bytes q                                     d q
    Q4_K  d, dmin f16, 12 bytes s and m, 128 bytes q            (d s) q - dmin m, s and m of each 32 inputs
    Q5_K  the same with 32 bytes of fifth bits before q
    Q6_K  128 bytes of q's low, 64 of its high bits, 16 bytes s, d f16      (d s) (q - 32), s of each 16 inputs

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Expanded, they are the numbers of the `gguf`
package bit for bit: products of the scales are exact in float32, and one rounding follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import side_by_side, some_inputs

if TYPE_CHECKING:
    from octavo.models.gguf_convert import GgufTensor

_NUMBERS_AT_ONCE = 1 << 20  # what is made of them on the way stays in the caches
Read = Callable[[torch.Tensor], QuantizedWeight]  # of u8[rows, blocks, bytes of a block]


def is_matrix_of_blocks(tensor: GgufTensor) -> bool:
    """Whether it can be had as a `GgufBlocks`."""
    return tensor.kind in FORMATS and len(tensor.shape) == 2


class GgufBlocks(QuantizedTensor):
    """One matrix."""

    def __init__(self, path: Path, tensor: GgufTensor) -> None:
        self._block_bytes, size, self._read = FORMATS[tensor.kind]
        self._tensor = tensor
        outputs, inputs = tensor.matrix
        num_bytes = outputs * inputs // size * self._block_bytes
        super().__init__(f"{path}: {tensor.name}", tensor.kind, outputs, inputs, num_bytes)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        found, most = self._tensor.blocks(), max(_NUMBERS_AT_ONCE // self.shape[1], 1)
        if device.type == "cpu":
            # Here, so that a worker with a GPU waits for no compiler of CPU code.
            from kernels.cpu.products.gguf_blocks import read_blocks

            if (whole := read_blocks(self.kind, found[rows.start : rows.stop], self.shape[1])) is not None:
                return some_inputs(self.name, whole, columns)
        pieces = []
        for start in range(rows.start, rows.stop, most):
            part = np.array(found[start : min(start + most, rows.stop)])  # a copy: the file's map is not writable
            pieces.append(self._read(torch.from_numpy(part).to(device).unflatten(1, (-1, self._block_bytes))))
        return some_inputs(self.name, side_by_side(pieces), columns)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float at this byte, f32[rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., 16] as [..., 32]: low ones, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """[..., 4] as [..., 32], from the lowest on."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words[..., None] >> shifts & 1).flatten(-2)


def _weight(
    numbers: Numbers,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    *,
    zero: int | None = None,
    offset: torch.Tensor | None = None,
) -> QuantizedWeight:
    zeros = None if zero is None else torch.full(scale.shape, zero, dtype=torch.int16, device=scale.device)
    codes = codes.flatten(1).contiguous().view(torch.uint8)
    return QuantizedWeight(numbers, codes, scale.contiguous(), group, zero=zeros, offset=offset)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(Numbers.UINT4, _nibbles(blocks[..., 2:]), _half(blocks, 0), 32, zero=8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(Numbers.UINT4, _nibbles(blocks[..., 4:]), _half(blocks, 0), 32, offset=_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _weight(Numbers.INT6, codes.view(torch.int8) - 16, _half(blocks, 0), 32)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _weight(Numbers.INT6, codes, _half(blocks, 0), 32, offset=_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(Numbers.INT8, blocks[..., 2:], _half(blocks, 0), 32)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    chunks = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack([chunks & 15, chunks >> 4], dim=-2)  # [rows, blocks, 4, 2, 32]
    scale, offset = _scales_of_32(blocks)
    return _weight(Numbers.UINT4, codes, scale, 32, offset=offset)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    chunks = blocks[..., 48:].unflatten(-1, (4, 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = blocks[..., 16:48].unsqueeze(-2) >> shifts & 1  # [rows, blocks, 8, 32]
    codes = torch.stack([chunks & 15, chunks >> 4], dim=-2).flatten(-3, -2) | fifth << 4
    scale, offset = _scales_of_32(blocks)
    return _weight(Numbers.INT6, codes, scale, 32, offset=offset)


def _scales_of_32(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets f32[rows, groups of 32] of Q4_K and Q5_K, whose six bits each lie in 12 bytes."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    scale, minimum = _half(blocks, 0)[..., None] * scales, _half(blocks, 2)[..., None] * minima
    return scale.flatten(1), -minimum.flatten(1)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat([low & 15, low >> 4], dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [rows, blocks, 2, 4, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = (nibbles | (high >> shifts & 3) << 4).view(torch.int8) - 32
    scale = _half(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return _weight(Numbers.INT6, codes, scale.flatten(1), 16)


FORMATS: dict[str, tuple[int, int, Read]] = {  # bytes of a block, numbers in it, how it is read on any device
    "Q4_0": (18, 32, _q4_0),
    "Q4_1": (20, 32, _q4_1),
    "Q5_0": (22, 32, _q5_0),
    "Q5_1": (24, 32, _q5_1),
    "Q8_0": (34, 32, _q8_0),
    "Q4_K": (144, 256, _q4_k),
    "Q5_K": (176, 256, _q5_k),
    "Q6_K": (210, 256, _q6_k),
}
