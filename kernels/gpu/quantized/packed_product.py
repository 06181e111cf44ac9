"""A dense layer with packed codes: its weight is read in few bits and never written in more.

    out = x W^T + bias,   W as `packed_codes` lays it out, x as it is

    x [T, K], out [T, N]   float32, float16 or bfloat16, rows of adjacent elements at any stride

A program has a tile of outputs and one of rows, 16 to 64 of them; the weight's tile is the left matrix, of which tensor
cores want 64 or 128 rows at least, so that a decode step's few rows fill the right one's 16 columns. A sum is cut into
segments as in `kernels.gpu.matmul`, which follow from the weight alone: a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.gpu.architectures import TENSOR_MEMORY, capability_of
from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.matmul import add_segments
from kernels.gpu.products import tile_of_program
from kernels.gpu.quantized.group_sums import group_sums
from kernels.gpu.quantized.packed_codes import TILE, WIDTH, PackedCodes, chunk_of
from kernels.gpu.quantized.segments import MOST_ROWS, Cut, chunks_of_segment
from kernels.gpu.quantized.unpacking import packed_sum
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import CAPABILITIES, Variant
from kernels.quantized_weight import Numbers


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def _packed_product_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    words,
    high,
    scale,
    scale_factor,
    zero,
    offset,
    offset_factor,
    sums,
    bias,
    count,
    out_stride,
    x_stride,
    sums_stride,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_OF_SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    column_tiles: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    row_tile, column_tile = tile_of_program(tl.cdiv(count, BLOCK_M), column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row is computed again, as are padded outputs, and not stored: no masks in the loop.
    x += tl.minimum(row, count - 1).to(tl.int64)[None, :] * x_stride
    words += column[:, None] * WIDTH
    if high is not None:
        high += column[:, None] * WIDTH
    scale += column
    if scale_factor is not None:
        scale_factor += column
    if zero is not None:
        zero += column
    if offset is not None:
        offset += column
        if offset_factor is not None:
            offset_factor += column
        sums += row
    first_chunk = tl.program_id(1) * CHUNKS_OF_SEGMENT  # of a product that is not split, 0
    past_chunk = tl.minimum(first_chunk + CHUNKS_OF_SEGMENT, CHUNKS) if IS_SPLIT else CHUNKS
    segment: tl.constexpr = CHUNKS_OF_SEGMENT if CHUNKS > CHUNKS_OF_SEGMENT and not IS_SPLIT else 0
    # fmt: off
    total = packed_sum(
        x, words, high, scale, scale_factor, zero, offset, offset_factor, sums, sums_stride, first_chunk, past_chunk,
        column_tiles * BLOCK_N, SIZE, NUMBERS, WIDTH, GROUP_SIZE, segment, BLOCK_N, BLOCK_M,
    )
    # fmt: on
    if IS_SPLIT:
        out += tl.program_id(1).to(tl.int64) * count * OUTPUTS
    elif bias is not None:
        total += tl.load(bias + column, column < OUTPUTS, 0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), (row < count)[None, :] & (column < OUTPUTS)[:, None])


def most_registers(block_m: int) -> int | None:
    """Of a thread. With few rows, told that it may take more, the assembler takes them, for half as many threads on a
    processor; with many, told that it may take all, it loads so far ahead that it spills."""
    return 128 if block_m < MOST_ROWS else None


def stages_of(dtype: torch.dtype) -> int:
    """Tiles on their way, for activations of this type."""
    return 2 if dtype == torch.float32 else 4


def warps_of(dtype: torch.dtype, capability: int) -> int:
    """Of a program, for activations of this type.

    With four or eight warps Triton has a large Blackwell's matrix units multiply float32 rows and codes, in TF32 and
    whatever precision is asked for: it looks at the bits of what was loaded, and a code has fewer. With two, which it
    leaves alone as well, the tile of 64 rows spills.
    """
    return 16 if dtype == torch.float32 and capability in TENSOR_MEMORY else 4


def cards_by_warps() -> dict[int, list[int]]:
    """Compute capabilities by the warps that programs have there for float32 rows."""
    found: dict[int, list[int]] = {}
    for capability in CAPABILITIES:
        found.setdefault(warps_of(torch.float32, capability), []).append(capability)
    return found


def packed_product(out: torch.Tensor, x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None = None) -> None:
    """See the top of this file. Raises ValueError for tensors that do not fit."""
    of_weight = weight.tensors
    shape = weight.out_features, weight.in_features
    cut, launch = _bound((out, x, *of_weight, bias), *shape, weight.numbers, weight.group)
    if not len(x):
        return
    parts = cut.parts(out)
    sums = None if weight.offset is None else group_sums(x, weight.group, weight.offset.shape[0], MOST_ROWS)
    launch(parts, x, *of_weight, sums, bias)
    if cut.is_split:
        add_segments(out, parts, bias)


@once_a_layout
def _bound(
    out: torch.Tensor,
    x: torch.Tensor,
    words: torch.Tensor,
    high: torch.Tensor | None,
    scale: torch.Tensor,
    scale_factor: torch.Tensor | None,
    zero: torch.Tensor | None,
    offset: torch.Tensor | None,
    offset_factor: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_outputs: int,
    size: int,
    numbers: Numbers,
    group: int,
) -> tuple[Cut, Launch]:
    count, num_chunks = len(x), len(words)
    check_rows("packed_product", x=x)
    check_rows("packed_product", out=out)
    if x.shape[1] != size or out.shape != (count, num_outputs) or out.dtype != x.dtype:
        raise ValueError(
            f"packed_product: {tuple(x.shape)} {x.dtype} to {tuple(out.shape)} {out.dtype} with a weight "
            f"{(num_outputs, size)}"
        )
    if bias is not None:
        check_contiguous("packed_product", "bias", bias, (num_outputs,), x)
    cut = Cut.of(count, num_outputs, num_chunks)
    sums_stride = 0 if offset is None else cdiv(count, MOST_ROWS) * MOST_ROWS
    launch = Launch(
        _packed_product_kernel,
        cut.grid,
        (count, num_outputs if cut.is_split else out.stride(0), x.stride(0), sums_stride),
        OUTPUTS=num_outputs,
        SIZE=size,
        NUMBERS=numbers.value,
        WIDTH=WIDTH,
        GROUP_SIZE=group,
        CHUNKS=num_chunks,
        CHUNKS_OF_SEGMENT=cut.segment,
        BLOCK_N=TILE,
        BLOCK_M=cut.block_m,
        IS_SPLIT=cut.is_split,
        num_warps=warps_of(x.dtype, capability_of(x.device)),
        num_stages=stages_of(x.dtype),
        maxnreg=most_registers(cut.block_m),
    )
    return cut, launch


def variants() -> Iterator[Variant]:
    """Each format with many rows, those that differ most with few, too; and sizes that no tile divides."""
    formats = [
        ("uint4", 128, "fp16", "zero"),  # AWQ, GPTQ, compressed-tensors
        ("uint4", 32, "i8", "offset"),  # Q4_K
        ("int6", 16, "i8", ""),  # Q6_K
        ("e4m3", 0, "fp32", ""),
        ("e4m3", 128, "fp32", ""),
        ("uint4", 32, "fp16", ""),  # Q4_0
        ("int8", 32, "fp16", ""),  # Q8_0
        ("e2m1", 32, "bf16", ""),  # MXFP4
    ]
    for index, (numbers, group, scale, extra) in enumerate(formats):
        for block_m in (16, MOST_ROWS) if index < 4 else (MOST_ROWS,):
            yield _variant(numbers, group, scale, extra, "bf16", 4096, 4096, block_m)
    numbers, group, scale, extra = formats[0]
    yield _variant(numbers, group, scale, extra, "fp16", 28672, 4096, 32)
    yield _variant(numbers, group, scale, extra, "bf16", 1000, 584, 64)
    for numbers, group, scale, extra in (formats[0], formats[2]):
        for num_warps, capabilities in cards_by_warps().items():
            variant = _variant(numbers, group, scale, extra, "fp32", 4096, 4096, 64)
            name = f"{variant.name}, {num_warps} warps"
            yield replace(variant, name=name, num_warps=num_warps, capabilities=capabilities)


def _variant(
    numbers: str, group: int, scale: str, extra: str, dtype: str, num_outputs: int, size: int, block_m: int
) -> Variant:
    num_chunks = triton.cdiv(size, chunk_of(Numbers(numbers)))
    segment = chunks_of_segment(num_outputs, num_chunks)
    is_split = block_m < MOST_ROWS and segment < num_chunks
    optional = {
        "high": "*i16" if numbers == "int6" else "",
        "scale_factor": "*fp32" if scale == "i8" else "",
        "zero": "*i8" if extra == "zero" else "",
        "offset": f"*{scale}" if extra == "offset" else "",
        "offset_factor": "*fp32" if extra == "offset" else "",
        "sums": "*fp32" if extra == "offset" else "",
        "bias": f"*{dtype}" if num_outputs == 1000 else "",
    }
    pointers = {"out": "*fp32" if is_split else f"*{dtype}", "x": f"*{dtype}", "words": "*i32", "scale": f"*{scale}"}
    pointers |= {name: kind for name, kind in optional.items() if kind}
    return Variant(
        f"packed_product {numbers} by {group or 'output'}{f', {extra}' if extra else ''}: "
        f"{dtype} {num_outputs} x {size}, {block_m} rows{' split' * is_split}",
        _packed_product_kernel,
        pointers | dict.fromkeys(["count", "out_stride", "x_stride", "sums_stride"], "i32"),
        dict.fromkeys([name for name, kind in optional.items() if not kind])
        | {"OUTPUTS": num_outputs, "SIZE": size, "NUMBERS": numbers, "WIDTH": WIDTH, "GROUP_SIZE": group}
        | {"CHUNKS": num_chunks, "CHUNKS_OF_SEGMENT": segment}
        | {"BLOCK_N": TILE, "BLOCK_M": block_m, "IS_SPLIT": is_split},
        num_stages=stages_of(torch.float32 if dtype == "fp32" else torch.bfloat16),
        max_registers=most_registers(block_m),
        divisible_by_16=(
            *pointers,
            "sums_stride",
            *["out_stride", "x_stride"] * (size % 16 == 0 and num_outputs % 16 == 0),
        ),
        may_spill=dtype == "fp32",
        # A few bytes, outside of the loop, for three programs on a processor instead of two.
        may_spill_on=(80, 86, 89, 120) if extra == "offset" or num_outputs == 1000 else (),
    )
