"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) of many requests in one batch, each row with its own.

    out[t] += scales[e] * b[e] (a[e] x[t]),  e = adapters[t];  rows with e < 0 have none

    x [T, n]              rows of adjacent elements, at any stride
    a [adapters, rank, n], b [adapters, m, rank]    contiguous; a smaller adapter is padded with zeros
    adapters i32[T], scales f32[adapters]
    between f32[segments, T, rank]    a[e] x[t], in as many parts as x is cut into; their sum is what is meant
    out [T, m]            rows at any stride: a part of a fused product's rows, for example

`lora_shrink` writes `between`, `lora_expand` reads it. A program has a tile of rows and one of the adapters that occur
there, counted from the lowest; one past the last has nothing to do. Rows may come in any order, and cost least where
neighbours share an adapter. Segments and tiles follow from the sizes of `a` and `b` alone, and a row is multiplied by
one program: its result depends on nothing beside it. `between` is rounded to the type of `b` before it is expanded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_alike, check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.products import segment_sum
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import Variant

_ROWS = 16  # the least that a tensor core multiplies: in a decode step neighbours have different adapters
_SEGMENT = 1024  # elements of x: a few programs share a row's work even where there is one tile of rows
_BLOCK_K = 128
_MOST_RANKS = 64  # at once
_OUTPUTS = 128  # at once
_NO_ADAPTER = tl.constexpr(2**31 - 1)


def num_segments(size: int) -> int:
    """Of `between` for rows of `size` elements."""
    return cdiv(size, _SEGMENT)


@triton.jit
def _adapter_of_program(adapters, row, count, number):  # type: ignore[no-untyped-def]
    """(adapters of rows, the one that this program has): of those that occur the one with this number."""
    adapter = tl.load(adapters + row, row < count, -1)
    adapter = tl.where(adapter < 0, _NO_ADAPTER, adapter)
    own = tl.min(adapter, 0)
    for _ in range(number):
        own = tl.min(tl.where(adapter > own, adapter, _NO_ADAPTER), 0)
    return adapter, own


@triton.jit(do_not_specialize=["count"])  # the same code for every number of rows
def _lora_shrink_kernel(  # type: ignore[no-untyped-def]
    between,
    x,
    a,
    adapters,
    count,
    x_stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    rank_tiles: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment = tl.program_id(1)
    rank = tl.program_id(2) % rank_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    adapter, own = _adapter_of_program(adapters, row, count, tl.program_id(2) // rank_tiles)
    if own < _NO_ADAPTER:
        line = x + tl.minimum(row, count - 1).to(tl.int64)[:, None] * x_stride
        lines = own.to(tl.int64) * RANK + tl.minimum(rank, RANK - 1)
        total = segment_sum(line, a + lines[None, :] * SIZE, segment, SIZE, ROWS, BLOCK_R, BLOCK_K, SEGMENT)
        place = between + (segment.to(tl.int64) * count + row)[:, None] * RANK + rank[None, :]
        tl.store(place, total, (adapter == own)[:, None] & (rank < RANK)[None, :])


@triton.jit(do_not_specialize=["count"])
def _lora_expand_kernel(  # type: ignore[no-untyped-def]
    out,
    between,
    b,
    adapters,
    scales,
    count,
    out_stride,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter, own = _adapter_of_program(adapters, row, count, tl.program_id(2))
    if own < _NO_ADAPTER:
        is_own = (adapter == own)[:, None]
        line = between + row.to(tl.int64)[:, None] * RANK
        lines = b + (own.to(tl.int64) * OUTPUTS + tl.minimum(column, OUTPUTS - 1))[None, :] * RANK
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for first in range(0, RANK, BLOCK_R):
            rank = first + tl.arange(0, BLOCK_R)
            h = tl.zeros((ROWS, BLOCK_R), tl.float32)
            for segment in range(SEGMENTS):
                part = line + segment * count.to(tl.int64) * RANK + rank[None, :]
                h += tl.load(part, is_own & (rank < RANK)[None, :], 0.0)
            weight = tl.load(lines + rank[:, None], (rank < RANK)[:, None], 0.0)
            total = tl.dot(h.to(weight.dtype), weight, total, input_precision="ieee")
        mask = is_own & (column < OUTPUTS)[None, :]
        place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        y = tl.load(place, mask, 0.0).to(tl.float32) + tl.load(scales + own) * total
        tl.store(place, y.to(out.dtype.element_ty), mask)


def lora_shrink(between: torch.Tensor, x: torch.Tensor, a: torch.Tensor, adapters: torch.Tensor) -> None:
    """See `reference.lora_shrink`; `between` has `num_segments(n)` parts. Raises ValueError for what does not
    fit."""
    tensors = between, x, a, adapters
    _bound_shrink(tensors)(*tensors)


@once_a_layout
def _bound_shrink(between: torch.Tensor, x: torch.Tensor, a: torch.Tensor, adapters: torch.Tensor) -> Launch:
    count, size = x.shape
    num_adapters, rank = a.shape[:2]
    check_rows("lora_shrink", x=x)
    check_alike("lora_shrink", "a", a, x)
    check_contiguous("lora_shrink", "a", a, (num_adapters, rank, size), x)
    check_contiguous("lora_shrink", "between", between, (num_segments(size), count, rank), x)
    _check_adapters("lora_shrink", adapters, x)
    if between.dtype != torch.float32:
        raise ValueError(f"lora_shrink: between must be float32, not {between.dtype}")
    block_r = _block_r(rank)
    return Launch(
        _lora_shrink_kernel,
        (cdiv(count, _ROWS), num_segments(size), min(num_adapters, _ROWS) * cdiv(rank, block_r)),
        (count, x.stride(0)),
        RANK=rank,
        SIZE=size,
        ROWS=_ROWS,
        BLOCK_R=block_r,
        BLOCK_K=_BLOCK_K,
        SEGMENT=_SEGMENT,
    )


def lora_expand(
    out: torch.Tensor, between: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor, scales: torch.Tensor
) -> None:
    """See `kernels.oracles.reference.lora_expand`. Raises ValueError for tensors that do not fit."""
    tensors = out, between, b, adapters, scales
    _bound_expand(tensors)(*tensors)


@once_a_layout
def _bound_expand(
    out: torch.Tensor, between: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor, scales: torch.Tensor
) -> Launch:
    count, num_outputs = out.shape
    segments, _, rank = between.shape
    num_adapters = b.shape[0]
    check_rows("lora_expand", out=out)
    check_alike("lora_expand", "b", b, out)
    check_contiguous("lora_expand", "b", b, (num_adapters, num_outputs, rank), out)
    check_contiguous("lora_expand", "between", between, (segments, count, rank), out)
    check_contiguous("lora_expand", "scales", scales, (num_adapters,), out)
    _check_adapters("lora_expand", adapters, out)
    if between.dtype != torch.float32 or scales.dtype != torch.float32:
        raise ValueError(f"lora_expand: between and scales must be float32, not {between.dtype} and {scales.dtype}")
    return Launch(
        _lora_expand_kernel,
        (cdiv(count, _ROWS), cdiv(num_outputs, _OUTPUTS), min(num_adapters, _ROWS)),
        (count, out.stride(0)),
        RANK=rank,
        OUTPUTS=num_outputs,
        SEGMENTS=segments,
        ROWS=_ROWS,
        BLOCK_R=_block_r(rank),
        BLOCK_N=_OUTPUTS,
    )


def _check_adapters(operation: str, adapters: torch.Tensor, rows: torch.Tensor) -> None:
    check_contiguous(operation, "adapters", adapters, (rows.shape[0],), rows)
    if adapters.dtype != torch.int32:
        raise ValueError(f"{operation}: adapters must be int32, not {adapters.dtype}")


def _block_r(rank: int) -> int:
    return max(16, min(_MOST_RANKS, next_power_of_2(rank)))


def variants() -> Iterator[Variant]:
    """Ranks below a tensor core's least, of one tile, and of several; a row that no segment divides."""
    shapes = [("bf16", 8, 4096), ("bf16", 16, 14336), ("bf16", 64, 576), ("bf16", 256, 4096)]
    for dtype, rank, size in [*shapes, ("fp16", 16, 4096), ("fp32", 16, 4096)]:
        tile: dict[str, object] = {"RANK": rank, "ROWS": _ROWS, "BLOCK_R": _block_r(rank)}
        shrunk = {"between": "*fp32", "x": f"*{dtype}", "a": f"*{dtype}", "adapters": "*i32"}
        yield Variant(
            f"lora_shrink {dtype} rank {rank} of {size}",
            _lora_shrink_kernel,
            shrunk | {"count": "i32", "x_stride": "i32"},
            tile | {"SIZE": size, "BLOCK_K": _BLOCK_K, "SEGMENT": _SEGMENT},
            divisible_by_16=(*shrunk, "x_stride"),
            may_spill=False,
        )
        expanded = {"out": f"*{dtype}", "between": "*fp32", "b": f"*{dtype}", "adapters": "*i32", "scales": "*fp32"}
        yield Variant(
            f"lora_expand {dtype} rank {rank} to {size}",
            _lora_expand_kernel,
            expanded | {"count": "i32", "out_stride": "i32"},
            tile | {"OUTPUTS": size, "SEGMENTS": num_segments(4096), "BLOCK_N": _OUTPUTS},
            divisible_by_16=(*expanded, "out_stride"),
            may_spill=False,
        )
