"""How a weight of few bits lies in a GPU's memory, so that a tile of it is one run of bytes and cheap to unpack.

A row's K codes are cut into chunks of 16 words, and a chunk into as many fields as a word of 32 bits holds codes: 8 of
4 bits or 4 of 8. Field f of a chunk's word i is the code of its input 16 f + i: shifting a tile of words gives the tile
of 16 inputs that stand next to each other in a row of activations, and 16 is what a tensor core multiplies at once.

    words    i32[chunks, N, 16]    a chunk is 128 inputs, or 64 of 8 bits
    high     i16[chunks, N, 16]    of six bits the upper two: field f is bits 2 f and 2 f + 1
    scale    [groups, N]           f16 or bf16 where they hold it without a rounding, else f32, or i8 with a factor
    zero     i8[groups, N]         or none; i16 of 8 bits
    offset   f32[groups, N]        or none, or i8 with a factor
    factors  f32[chunks, N]        of scales and offsets, where these are integers times them, or none

Groups and chunks divide each other, or there is one group: a scale an output. N is rounded up to whole tiles of 64;
outputs, inputs and groups past the end are zeros.
(Wider fields were tried: with 32 inputs a field, 64 rows need more registers than there are.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.gpu.quantized.factored_scales import factored
from kernels.quantized_weight import Numbers, QuantizedWeight

WIDTH = 16  # words of a chunk
TILE = 64  # outputs that a program multiplies: what a Hopper tensor core takes at once

_FIELD_BITS = {Numbers.UINT4: 4, Numbers.E2M1: 4, Numbers.INT6: 4, Numbers.INT8: 8, Numbers.E4M3: 8}
_TENSORS = ("words", "high", "scale", "scale_factor", "zero", "offset", "offset_factor")
_WITH_ZEROS = (Numbers.UINT4, Numbers.INT8)


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """See the top of this file; of one weight [N, K], or with one more dimension in front of one an expert."""

    numbers: Numbers
    out_features: int
    in_features: int
    group: int  # inputs of a scale; 0: all of a row
    words: torch.Tensor
    high: torch.Tensor | None
    scale: torch.Tensor
    scale_factor: torch.Tensor | None
    zero: torch.Tensor | None
    offset: torch.Tensor | None
    offset_factor: torch.Tensor | None

    @property
    def format(self) -> tuple[object, ...]:
        """All but the numbers and the type of scales."""
        extras = [x is None for x in self.tensors]
        return self.numbers, self.group, self.out_features, self.in_features, extras

    @property
    def chunk(self) -> int:
        """Inputs."""
        return chunk_of(self.numbers)

    @property
    def num_chunks(self) -> int:
        """Of a row."""
        return self.words.shape[-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], with one number in front of one an expert."""
        return (*self.words.shape[:-3], self.out_features, self.in_features)

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.words.device

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them, in the order in which kernels take them."""
        return tuple(getattr(self, name) for name in _TENSORS)

    def of_experts(self, some: slice) -> PackedCodes:
        """Of weights with an expert each, some of them."""
        chosen: list[Any] = [None if x is None else x[some] for x in self.tensors]
        return replace(self, **dict(zip(_TENSORS, chosen, strict=True)))

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(x.nbytes for x in self.tensors if x is not None)


def chunk_of(numbers: Numbers) -> int:
    """Inputs of a chunk."""
    return 32 // _FIELD_BITS[numbers] * WIDTH


def pack_codes(weight: QuantizedWeight) -> PackedCodes | None:
    """None where this layout has no place for it: groups of other sizes, zeros of numbers that have none. The order of
    its columns is the caller's to keep."""
    group = 0 if weight.group >= weight.in_features else weight.group
    chunk = chunk_of(weight.numbers)
    if group % WIDTH or (group and max(group, chunk) % min(group, chunk)):
        return None
    if weight.zero is not None and weight.numbers not in _WITH_ZEROS:
        return None
    if weight.offset is not None and (not group or group & (group - 1) or group > chunk):
        return None
    num_chunks = -(-weight.in_features // chunk)
    num_groups = -(-num_chunks * chunk // group) if group else 1
    words, high = _words(weight, num_chunks)
    groups_of_chunk = chunk // group if group else 1
    scale, scale_factor = _in_fewest_bytes(weight.scale, groups_of_chunk)
    zero, offset, offset_factor = weight.zero, weight.offset, None
    if zero is not None and weight.numbers is Numbers.UINT4:
        zero = zero.to(torch.int8)
    if offset is not None and (parts := factored(offset, groups_of_chunk)) is not None:
        offset, offset_factor = parts
    return PackedCodes(
        weight.numbers,
        weight.out_features,
        weight.in_features,
        group,
        words,
        high,
        scale=_of_groups(scale, num_groups),
        scale_factor=None if scale_factor is None else _of_groups(scale_factor, num_chunks),
        zero=None if zero is None else _of_groups(zero, num_groups),
        offset=None if offset is None else _of_groups(offset, num_groups),
        offset_factor=None if offset_factor is None else _of_groups(offset_factor, num_chunks),
    )


def pack_experts(weights: Iterable[QuantizedWeight | None]) -> PackedCodes | None:
    """Weights of one size, an expert each, in one, for `grouped_quantized_matmul`. None where one is not there, where
    they are not of one format, or this layout has no place for them: no more are asked for then."""
    packed: list[PackedCodes] = []
    for weight in weights:
        one = None if weight is None or weight.order is not None else pack_codes(weight)
        if one is None or (packed and one.format != packed[0].format):
            return None
        packed.append(one)
    return stacked(packed)


def stacked(packed: Sequence[PackedCodes]) -> PackedCodes:
    """One an expert, of one size and format, in one."""
    tensors: dict[str, Any] = {name: [getattr(one, name) for one in packed] for name in _TENSORS}
    if len({scale.dtype for scale in tensors["scale"]}) > 1:
        tensors["scale"] = [scale.float() for scale in tensors["scale"]]
    joined: dict[str, Any] = {name: None if given[0] is None else torch.stack(given) for name, given in tensors.items()}
    return replace(packed[0], **joined)


def _words(weight: QuantizedWeight, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes, numbers = weight.codes, weight.numbers
    if numbers is Numbers.INT8:  # from -128 on to from 0 on
        codes = codes ^ 0x80
    if numbers is Numbers.INT6:
        codes = codes + 32
    bits = _FIELD_BITS[numbers]
    missing = num_chunks * chunk_of(numbers) - weight.in_features
    codes = torch.nn.functional.pad(codes, (0, missing, 0, -weight.out_features % TILE))
    codes = codes.view(codes.shape[0], num_chunks, 32 // bits, WIDTH)
    words = codes.new_zeros((num_chunks, codes.shape[0], WIDTH), dtype=torch.int32)
    has_high = numbers is Numbers.INT6
    high = torch.zeros_like(words) if has_high else None
    for field in range(32 // bits):  # one by one: as many words as codes would be four to eight times the weight
        of_field = codes[:, :, field].transpose(0, 1).int()
        words |= (of_field & (2**bits - 1)) << (bits * field)
        if high is not None:
            high |= (of_field >> 4) << (2 * field)
    return words, None if high is None else high.to(torch.int16)


def _of_groups(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[N, G] to [num_groups, N], both padded."""
    return torch.nn.functional.pad(x, (0, num_groups - x.shape[1], 0, -x.shape[0] % TILE)).t().contiguous()


def _in_fewest_bytes(scale: torch.Tensor, groups_of_chunk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales f32[N, G], in 16 bits or with a factor where they are the same so."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal((narrow := scale.to(dtype)).float(), scale):
            return narrow, None
    return (factored(scale, groups_of_chunk) if groups_of_chunk > 1 else None) or (scale, None)
