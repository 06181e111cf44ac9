"""A weight of packed codes, written out in the type of activations: for products with so many rows that unpacking a
tile for each of them anew costs more than writing all of it once.

    out [N, K] = scale[n, g] * (number[n, k] - zero[n, g]) + offset[n, g],   rounded to float32, then to its type

with one more dimension in front, of weights that have one: an expert each. Or some of the outputs: whoever multiplies
by all takes MOST_BYTES of it at a time, so that it needs little memory, above all in graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.architectures import capability_of
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.quantized.packed_codes import TILE, WIDTH, PackedCodes, chunk_of
from kernels.gpu.quantized.unpacking import numbers_of
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import Variant
from kernels.quantized_weight import Numbers

MOST_BYTES = 256 << 20  # at a time: all of a layer's largest weight in an 8 B model
# Rows from which on a whole weight is written out and multiplied in their type sooner than it is unpacked for each tile
# of 64, by the card's compute capability. Measured on an H200, where 96 take as long either way, with weights of 4,096
# to 28,672 in 4 bits; elsewhere reasoned, as writing costs bandwidth and others, an H100 too, have less of it for each
# multiprocessor.
_EXPANDING_ROWS = {range(90, 110): 128, range(80, 81): 192}
_ELSEWHERE = 640


def expanding_rows(device: torch.device) -> int:
    """Rows of activations from which on a weight is to be expanded on this device."""
    capability = capability_of(device)
    return next((rows for cards, rows in _EXPANDING_ROWS.items() if capability in cards), _ELSEWHERE)


@triton.jit(do_not_specialize=["first_tile"])  # type: ignore[untyped-decorator]  # Triton has no types
def _expand_kernel(  # type: ignore[no-untyped-def]
    out,
    words,
    high,
    scale,
    scale_factor,
    zero,
    offset,
    offset_factor,
    first_tile,
    num_outputs,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program has one chunk of some outputs of an expert; see `packed_codes` for how they lie. `out` has
    `num_outputs` an expert, from tile `first_tile` on."""
    fields: tl.constexpr = 4 if (NUMBERS == "int8" or NUMBERS == "e4m3") else 8
    # Exponents of the numbers as `numbers_of` leaves them.
    factor: tl.constexpr = 256.0 if NUMBERS == "e4m3" else 16384.0 if NUMBERS == "e2m1" else 1.0
    lines: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    chunk, expert = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = first_tile * BLOCK_N + place
    word = tl.arange(0, WIDTH)
    in_chunks = (expert * CHUNKS + chunk) * lines + output
    places = in_chunks[:, None] * WIDTH + word[None, :]
    packed = tl.load(words + places)
    upper = None
    if high is not None:
        upper = tl.load(high + places)
    for field in tl.static_range(fields):
        first = chunk * (fields * WIDTH) + field * WIDTH
        group = expert * GROUPS + (first // GROUP_SIZE if GROUP_SIZE else 0)
        of_group = group * lines + output
        nought = None
        if zero is not None:
            nought = tl.load(zero + of_group)
        values = numbers_of(packed, upper, nought, field, NUMBERS, tl.float32)
        by = tl.load(scale + of_group).to(tl.float32) * factor
        if scale_factor is not None:
            by *= tl.load(scale_factor + in_chunks)
        values = values * by[:, None]
        if offset is not None:
            more = tl.load(offset + of_group).to(tl.float32)
            if offset_factor is not None:
                more *= tl.load(offset_factor + in_chunks)
            values += more[:, None]
        column = first + word
        inside = (place < num_outputs)[:, None] & (column < SIZE)[None, :]
        places_out = (expert * num_outputs + place)[:, None] * SIZE + column[None, :]
        tl.store(out + places_out, values.to(out.dtype.element_ty), inside)


def expanded_weight(weight: PackedCodes, dtype: torch.dtype, outputs: slice | None = None) -> torch.Tensor:
    """See the top of this file. `outputs`: some of them, from a multiple of 64 on; of weights without experts."""
    first, past, _ = (outputs or slice(None)).indices(weight.out_features)
    if first % TILE:
        raise ValueError(f"expanded_weight: outputs from {first} on, not from a multiple of {TILE}")
    out = torch.empty(*weight.shape[:-2], past - first, weight.in_features, dtype=dtype, device=weight.device)
    tensors = out, *weight.tensors
    _bound(tensors, weight.out_features, weight.numbers, weight.group, first // TILE)(*tensors)
    return out


def slabs(num_outputs: int, size: int, itemsize: int) -> Iterator[slice]:
    """All outputs of a weight [num_outputs, size], some at a time."""
    at_once = max(MOST_BYTES // (size * itemsize) // TILE, 1) * TILE
    for first in range(0, num_outputs, at_once):
        yield slice(first, min(first + at_once, num_outputs))


@once_a_layout
def _bound(
    out: torch.Tensor,
    words: torch.Tensor,
    high: torch.Tensor | None,
    scale: torch.Tensor,
    scale_factor: torch.Tensor | None,
    zero: torch.Tensor | None,
    offset: torch.Tensor | None,
    offset_factor: torch.Tensor | None,
    all_outputs: int,
    numbers: Numbers,
    group: int,
    first_tile: int,
) -> Launch:
    num_outputs, size = out.shape[-2:]
    grid = words.shape[-3], cdiv(num_outputs, TILE), 1 if out.dim() == 2 else len(out)
    constants = _constants(all_outputs, size, numbers, group, words.shape[-3], scale.shape[-2])
    return Launch(_expand_kernel, grid, (first_tile, num_outputs), **constants)


def _constants(
    num_outputs: int, size: int, numbers: Numbers, group: int, num_chunks: int, num_groups: int
) -> dict[str, object]:
    sizes = {"OUTPUTS": num_outputs, "SIZE": size, "WIDTH": WIDTH, "GROUP_SIZE": group, "BLOCK_N": TILE}
    return {**sizes, "NUMBERS": numbers.value, "CHUNKS": num_chunks, "GROUPS": num_groups}


def variants() -> Iterator[Variant]:
    """Each format in bfloat16, and sizes that no tile divides."""
    formats = [
        (Numbers.UINT4, 128, "fp16", "zero"),
        (Numbers.UINT4, 32, "i8", "offset"),
        (Numbers.INT6, 16, "i8", ""),
        (Numbers.INT8, 32, "fp16", ""),
        (Numbers.E4M3, 0, "fp32", ""),
        (Numbers.E2M1, 32, "bf16", ""),
    ]
    for numbers, group, scale, extra in formats:
        for num_outputs, size in ((4096, 4096), (1000, 584)) if numbers is Numbers.UINT4 else ((4096, 4096),):
            optional = {
                "high": "*i16" if numbers is Numbers.INT6 else "",
                "scale_factor": "*fp32" if scale == "i8" else "",
                "zero": "*i8" if extra == "zero" else "",
                "offset": f"*{scale}" if extra == "offset" else "",
                "offset_factor": "*fp32" if extra == "offset" else "",
            }
            pointers = {"out": "*bf16", "words": "*i32", "scale": f"*{scale}"}
            pointers |= {name: kind for name, kind in optional.items() if kind}
            absent = dict.fromkeys([name for name, kind in optional.items() if not kind])
            num_chunks = cdiv(size, chunk_of(numbers))
            num_groups = num_chunks * chunk_of(numbers) // group if group else 1
            yield Variant(
                f"expanded_weight {numbers.value} by {group or 'output'}{f', {extra}' if extra else ''}: "
                f"{num_outputs} x {size}",
                _expand_kernel,
                pointers | {"first_tile": "i32", "num_outputs": "i32"},
                absent | _constants(num_outputs, size, numbers, group, num_chunks, num_groups),
                divisible_by_16=tuple(pointers),
                may_spill=False,
            )
