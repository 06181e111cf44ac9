"""The products of a mixture of experts, each expert's rows with its own weight, in one launch.

    out[i] = weights[e] x[rows[i]] + bias[e],  starts[e] <= i < starts[e + 1]

    x [T, n]                     rows of adjacent elements, at any stride
    weights [num_experts, m, n]  contiguous
    starts i32[num_experts + 1]  on the device: how many rows an expert has is never known to the host
    rows i64[R]                  which row of x is meant; without it, row i
    bias [num_experts, m]        contiguous; or none
    out [R, m]                   rows at any stride

The grid has room for the worst case, R / tile + num_experts tiles of rows; a program counts the tiles of the experts
before its own, and one past the last has nothing to do. A row is summed in one piece, in the order that all tiles have:
its result depends on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.architectures import TENSOR_MEMORY, capability_of
from kernels.gpu.checks import check_alike, check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.products import segment_sum, tile_of_program
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ALL_REGISTERS = 255  # of a thread: left alone, the assembler spills a few for more threads than shared memory allows
_MANY_ROWS = 128  # of an expert, on average: from here on tiles are as large as a plain product's


@triton.jit(do_not_specialize=["row_tiles"])
def _grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weights,
    starts,
    rows,
    bias,
    row_tiles,
    out_stride,
    x_stride,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    column_tiles: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    row_tile, column_tile = tile_of_program(row_tiles, column_tiles)
    each = tl.arange(0, PADDED_EXPERTS)
    first = tl.load(starts + each, each < EXPERTS, 0)
    tiles = tl.cdiv(tl.load(starts + each + 1, each < EXPERTS, 0) - first, BLOCK_M)
    # The padding has no tiles: where all experts' tiles are passed, this is PADDED_EXPERTS.
    expert = tl.sum((tl.cumsum(tiles, 0) <= row_tile).to(tl.int32), 0)
    if expert < EXPERTS:
        tile = row_tile - tl.sum(tl.where(each < expert, tiles, 0), 0)
        end = tl.load(starts + expert + 1)
        row = tl.load(starts + expert) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Past the end the last row and column are computed again, and not stored: no masks in the loop.
        source = tl.minimum(row, end - 1).to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows + source)
        line = tl.minimum(column, OUTPUTS - 1).to(tl.int64) + expert.to(tl.int64) * OUTPUTS
        chosen = x + source[:, None] * x_stride
        total = segment_sum(chosen, weights + line[None, :] * SIZE, 0, SIZE, BLOCK_M, BLOCK_N, BLOCK_K, SIZE)
        if bias is not None:
            total += tl.load(bias + line).to(tl.float32)[None, :]
        place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), (row < end)[:, None] & (column < OUTPUTS)[None, :])


def grouped_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    of_experts: int | None = None,
) -> None:
    """See `reference.grouped_matmul`; one type and device. `of_experts`: among how many tokens have chosen, where
    others are elsewhere. Raises ValueError for tensors that do not fit."""
    tensors = out, x, weights, starts, rows, bias
    _bound(tensors, of_experts)(*tensors)


@once_a_layout
def _bound(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    of_experts: int | None,
) -> Launch:
    num_experts, num_outputs, size = weights.shape
    num_rows = out.shape[0]
    check_rows("grouped_matmul", x=x)
    check_rows("grouped_matmul", out=out)
    check_alike("grouped_matmul", "out", out, x)
    check_alike("grouped_matmul", "weights", weights, x)
    check_contiguous("grouped_matmul", "weights", weights, (num_experts, num_outputs, x.shape[1]), x)
    check_contiguous("grouped_matmul", "starts", starts, (num_experts + 1,), x)
    if rows is not None:
        check_contiguous("grouped_matmul", "rows", rows, (num_rows,), x)
    if bias is not None:
        check_alike("grouped_matmul", "bias", bias, x)
        check_contiguous("grouped_matmul", "bias", bias, (num_experts, num_outputs), x)
    if out.shape[1] != num_outputs or (rows is None and x.shape[0] != num_rows):
        raise ValueError(f"grouped_matmul: out must be [R, {num_outputs}] for R rows, not {tuple(out.shape)}")
    if starts.dtype != torch.int32 or (rows is not None and rows.dtype != torch.int64):
        raise ValueError("grouped_matmul: starts must be int32, rows int64")
    rows_of_expert = num_rows // (of_experts or num_experts) if capability_of(x.device) not in TENSOR_MEMORY else 0
    tile = _tile(num_outputs, size, weights.dtype, rows_of_expert)
    row_tiles = num_rows // tile.rows + min(num_experts, num_rows)
    return Launch(
        _grouped_matmul_kernel,
        (row_tiles * cdiv(num_outputs, tile.outputs),),
        (row_tiles, out.stride(0), x.stride(0)),
        EXPERTS=num_experts,
        PADDED_EXPERTS=next_power_of_2(num_experts),
        OUTPUTS=num_outputs,
        SIZE=size,
        **tile.constants,
        HAS_ROWS=rows is not None,
        num_warps=tile.num_warps,
        maxnreg=_ALL_REGISTERS,
    )


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a program multiplies at once."""

    rows: int
    outputs: int
    elements: int  # of a row
    num_warps: int = 4

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.outputs, "BLOCK_K": self.elements}


def _tile(num_outputs: int, size: int, dtype: torch.dtype, rows_of_expert: int) -> _Tile:
    """Without tensor cores registers are short, as they are in a large tile with masks in its loop. 64 rows are what
    four warps of a Hopper multiply at once."""
    if dtype == torch.float32:
        return _Tile(64, max(16, min(64, next_power_of_2(num_outputs))), 16)
    if rows_of_expert >= _MANY_ROWS and num_outputs >= 256 and size % 64 == 0:
        return _Tile(128, 256, 64, num_warps=8)
    return _Tile(64, max(16, min(128, next_power_of_2(num_outputs))), 64)


def variants() -> Iterator[Variant]:
    """Both products of Mixtral's, Qwen3-MoE's and gpt-oss's experts, and a size that no tile divides."""
    shapes = [("bf16", 8, 28672, 4096, True), ("bf16", 128, 1536, 2048, True), ("bf16", 128, 2048, 768, False)]
    shapes += [("bf16", 5, 1000, 584, True), ("fp16", 8, 4096, 14336, False), ("fp32", 8, 4096, 14336, True)]
    biased = [("bf16", 32, 5760, 2880, True), ("bf16", 32, 2880, 2880, False)]
    for dtype, num_experts, num_outputs, size, has_rows in shapes + biased:
        of_type = torch.float32 if dtype == "fp32" else torch.bfloat16
        pointers = dict.fromkeys(["out", "x", "weights"], f"*{dtype}") | {"starts": "*i32"}
        constants: dict[str, object] = {} if has_rows else {"rows": None}
        if has_rows:
            pointers["rows"] = "*i64"
        is_biased = num_outputs % 2880 == 0
        if is_biased:
            pointers["bias"] = f"*{dtype}"
        else:
            constants["bias"] = None
        for tile in dict.fromkeys(_tile(num_outputs, size, of_type, count) for count in (1, _MANY_ROWS)):
            name = f"{dtype} {num_experts} x {num_outputs} x {size}, {tile.rows} rows"
            yield Variant(
                f"grouped_matmul {name}{' chosen' * has_rows}{' bias' * is_biased}",
                _grouped_matmul_kernel,
                pointers | dict.fromkeys(["row_tiles", "out_stride", "x_stride"], "i32"),
                constants
                | {"EXPERTS": num_experts, "PADDED_EXPERTS": next_power_of_2(num_experts)}
                | {"OUTPUTS": num_outputs, "SIZE": size, "HAS_ROWS": has_rows}
                | tile.constants,
                num_warps=tile.num_warps,
                max_registers=_ALL_REGISTERS,
                divisible_by_16=(*pointers, *["out_stride", "x_stride"] * (size % 16 == 0)),
                may_spill=dtype == "fp32",  # an Ampere GPU is a few registers short
            )
