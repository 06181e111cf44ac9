"""The products of a mixture of experts with packed codes, each expert's rows with its own weight, in one launch.

    out[i] = W[e] x[rows[i]] + bias[e],  starts[e] <= i < starts[e + 1]

Arguments and grid are those of `kernels.gpu.experts.grouped_matmul`, weights those of `packed_codes` with experts in
front. A row's sum is one piece, in the same order in tiles of 16 rows as of 64: how many there are is chosen by how
many rows an expert has on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.gpu.architectures import capability_of
from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.experts.grouped_matmul import grouped_matmul
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.products import tile_of_program
from kernels.gpu.quantized import expanded_weight as expanded
from kernels.gpu.quantized.expanded_weight import expanding_rows
from kernels.gpu.quantized.group_sums import group_sums
from kernels.gpu.quantized.packed_codes import TILE, WIDTH, PackedCodes, chunk_of
from kernels.gpu.quantized.packed_product import cards_by_warps, most_registers, stages_of, warps_of
from kernels.gpu.quantized.segments import MOST_ROWS, block_m_of
from kernels.gpu.quantized.unpacking import packed_sum
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant
from kernels.quantized_weight import Numbers

_TIMES_AS_MANY = 2  # rows of an expert as of a plain weight, from which on writing all of them out pays


@triton.jit(do_not_specialize=["row_tiles"])  # type: ignore[untyped-decorator]  # Triton has no types
def _grouped_product_kernel(  # type: ignore[no-untyped-def]
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
    starts,
    rows,
    bias,
    row_tiles,
    out_stride,
    x_stride,
    sums_stride,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    column_tiles: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    lines: tl.constexpr = column_tiles * BLOCK_N
    row_tile, column_tile = tile_of_program(row_tiles, column_tiles)
    each = tl.arange(0, PADDED_EXPERTS)
    first = tl.load(starts + each, each < EXPERTS, 0)
    tiles = tl.cdiv(tl.load(starts + each + 1, each < EXPERTS, 0) - first, BLOCK_M)
    # The padding has no tiles: where all experts' tiles are passed, this is PADDED_EXPERTS.
    expert = tl.sum((tl.cumsum(tiles, 0) <= row_tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    tile = row_tile - tl.sum(tl.where(each < expert, tiles, 0), 0)
    end = tl.load(starts + expert + 1)
    row = tl.load(starts + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row is computed again, as are padded outputs, and not stored: no masks in the loop.
    source = tl.minimum(row, end - 1).to(tl.int64)
    if rows is not None:
        source = tl.load(rows + source)
    x += source[None, :] * x_stride
    in_words = expert.to(tl.int64) * (CHUNKS * lines * WIDTH) + column[:, None] * WIDTH
    words += in_words
    if high is not None:
        high += in_words
    in_groups = expert.to(tl.int64) * (GROUPS * lines) + column
    scale += in_groups
    in_chunks = expert.to(tl.int64) * (CHUNKS * lines) + column
    if scale_factor is not None:
        scale_factor += in_chunks
    if zero is not None:
        zero += in_groups
    if offset is not None:
        offset += in_groups
        if offset_factor is not None:
            offset_factor += in_chunks
        sums += source
    # fmt: off
    total = packed_sum(
        x, words, high, scale, scale_factor, zero, offset, offset_factor, sums, sums_stride, 0, CHUNKS,
        lines, SIZE, NUMBERS, WIDTH, GROUP_SIZE, 0, BLOCK_N, BLOCK_M,
    )
    # fmt: on
    if bias is not None:
        of_outputs = tl.load(bias + expert.to(tl.int64) * OUTPUTS + column, column < OUTPUTS, 0.0)
        total += of_outputs.to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), (row < end)[None, :] & (column < OUTPUTS)[:, None])


def grouped_quantized_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: PackedCodes,
    starts: torch.Tensor,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    of_experts: int | None = None,
    may_expand: bool = False,
) -> None:
    """See `reference.grouped_matmul`; weights of `packed_codes.stacked`. `of_experts`: among how many tokens have
    chosen, where others are elsewhere; rows that went there are at the end of `out`. `may_expand`: see
    `quantized_product`. Raises ValueError for tensors that do not fit."""
    all_experts = of_experts or weights.shape[0]
    if may_expand and len(out) >= _TIMES_AS_MANY * expanding_rows(out.device) * all_experts:
        _multiply_expanded(out, x, weights, starts, rows, bias, all_experts)
        return
    of_weights = weights.tensors
    shape = weights.out_features, weights.in_features
    launch = _bound((out, x, *of_weights, starts, rows, bias), *shape, weights.numbers, weights.group, of_experts)
    if not len(out):
        return
    sums = None if weights.offset is None else group_sums(x, weights.group, weights.offset.shape[-2], MOST_ROWS)
    launch(out, x, *of_weights, sums, starts, rows, bias)


def _multiply_expanded(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: PackedCodes,
    starts: torch.Tensor,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    of_experts: int,
) -> None:
    """Some experts at a time: as many as MOST_BYTES hold, or one."""
    num_experts, num_outputs, size = weights.shape
    at_once = max(expanded.MOST_BYTES // (num_outputs * size * x.itemsize), 1)
    for first in range(0, num_experts, at_once):
        some = slice(first, min(first + at_once, num_experts))
        in_type = expanded.expanded_weight(weights.of_experts(some), x.dtype)
        of_some = starts[some.start : some.stop + 1]
        of_bias = None if bias is None else bias[some]
        grouped_matmul(out, x, in_type, of_some, rows, of_bias, of_experts=of_experts)


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
    starts: torch.Tensor,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_outputs: int,
    size: int,
    numbers: Numbers,
    group: int,
    of_experts: int | None,
) -> Launch:
    num_experts, num_rows = len(words), len(out)
    check_rows("grouped_quantized_matmul", x=x)
    check_rows("grouped_quantized_matmul", out=out)
    check_contiguous("grouped_quantized_matmul", "starts", starts, (num_experts + 1,), x)
    if rows is not None:
        check_contiguous("grouped_quantized_matmul", "rows", rows, (num_rows,), x)
    if bias is not None:
        check_contiguous("grouped_quantized_matmul", "bias", bias, (num_experts, num_outputs), x)
    if x.shape[1] != size or out.shape[1] != num_outputs or (rows is None and x.shape[0] != num_rows):
        raise ValueError(
            f"grouped_quantized_matmul: {tuple(x.shape)} to {tuple(out.shape)} with weights {(num_outputs, size)}"
        )
    if starts.dtype != torch.int32 or (rows is not None and rows.dtype != torch.int64) or out.dtype != x.dtype:
        raise ValueError("grouped_quantized_matmul: starts must be int32, rows int64, out of the type of x")
    block_m = block_m_of(cdiv(num_rows, of_experts or num_experts))
    row_tiles = num_rows // block_m + min(num_experts, num_rows)
    sums_stride = 0 if offset is None else cdiv(len(x), MOST_ROWS) * MOST_ROWS
    return Launch(
        _grouped_product_kernel,
        (row_tiles * cdiv(num_outputs, TILE),),
        (row_tiles, out.stride(0), x.stride(0), sums_stride),
        EXPERTS=num_experts,
        PADDED_EXPERTS=next_power_of_2(num_experts),
        OUTPUTS=num_outputs,
        SIZE=size,
        NUMBERS=numbers.value,
        WIDTH=WIDTH,
        GROUP_SIZE=group,
        CHUNKS=words.shape[-3],
        GROUPS=scale.shape[-2],
        BLOCK_N=TILE,
        BLOCK_M=block_m,
        num_warps=warps_of(x.dtype, capability_of(x.device)),
        num_stages=stages_of(x.dtype),
        maxnreg=most_registers(block_m),
    )


def variants() -> Iterator[Variant]:
    """Experts of Mixtral by groups of four bits, of Qwen3-MoE by blocks of E4M3, of gpt-oss in MXFP4."""
    formats = [
        ("uint4", 128, "fp16", 8, 28672, 4096, True),
        ("e4m3", 128, "fp32", 128, 1536, 2048, True),
        ("e2m1", 32, "bf16", 32, 5760, 2880, False),
    ]
    for of_format in formats:
        for block_m in (16, MOST_ROWS):
            yield _variant("bf16", *of_format, block_m)
    for num_warps, capabilities in cards_by_warps().items():
        variant = _variant("fp32", *formats[0], 16)
        name = f"{variant.name}, fp32, {num_warps} warps"
        yield replace(variant, name=name, num_warps=num_warps, capabilities=capabilities)


def _variant(
    dtype: str,
    numbers: str,
    group: int,
    scale: str,
    num_experts: int,
    num_outputs: int,
    size: int,
    has_rows: bool,
    block_m: int,
) -> Variant:
    num_chunks = cdiv(size, chunk_of(Numbers(numbers)))
    pointers = {"out": f"*{dtype}", "x": f"*{dtype}", "words": "*i32", "scale": f"*{scale}", "starts": "*i32"}
    absent = ["high", "scale_factor", "offset", "offset_factor", "sums"]
    optional = [("zero", "*i8", numbers == "uint4"), ("rows", "*i64", has_rows)]
    for name, kind, is_there in [*optional, ("bias", f"*{dtype}", numbers == "e2m1")]:
        if is_there:
            pointers[name] = kind
        else:
            absent.append(name)
    return Variant(
        f"grouped_product {numbers} by {group}: {num_experts} x {num_outputs} x {size}, {block_m} rows",
        _grouped_product_kernel,
        pointers | dict.fromkeys(["row_tiles", "out_stride", "x_stride", "sums_stride"], "i32"),
        dict.fromkeys(absent)
        | {"EXPERTS": num_experts, "PADDED_EXPERTS": next_power_of_2(num_experts)}
        | {"OUTPUTS": num_outputs, "SIZE": size, "NUMBERS": numbers, "WIDTH": WIDTH, "GROUP_SIZE": group}
        | {"CHUNKS": num_chunks, "GROUPS": num_chunks * chunk_of(Numbers(numbers)) // group}
        | {"BLOCK_N": TILE, "BLOCK_M": block_m},
        num_stages=stages_of(torch.float32 if dtype == "fp32" else torch.bfloat16),
        max_registers=most_registers(block_m),
        divisible_by_16=(*pointers, "out_stride", "x_stride", "sums_stride"),
        may_spill=dtype == "fp32",
    )
