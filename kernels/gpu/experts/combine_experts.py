"""What experts made of a token's rows, added up by its shares.

    out[t] = ((0 + shares[t, 0] x[places[t, 0]]) + shares[t, 1] x[places[t, 1]]) + ...

    out [T, n], x [R, n]                    rows of adjacent elements, at any stride
    shares f32[T, k], places i32[T, k]      contiguous; a place of -1 adds nothing: its expert is elsewhere

A program adds up part of one row in float32, in the order of the choices: that of the largest share first. The result
depends on nothing beside the row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_alike, check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, part_of_row
from kernels.gpu.variant import Variant


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, x, shares, places, out_stride, x_stride, SIZE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        place = tl.load(places + token * CHOSEN + choice).to(tl.int64)
        share = tl.load(shares + token * CHOSEN + choice)
        made = tl.load(x + place * x_stride + column, (column < SIZE) & (place >= 0), 0.0).to(tl.float32)
        total += tl.where(place >= 0, made * share, 0.0)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), column < SIZE)


def combine_experts(out: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, places: torch.Tensor) -> None:
    """See `reference.combine_experts`. Raises ValueError where a shape, stride or type does not fit."""
    tensors = out, x, shares, places
    _bound(tensors)(*tensors)


@once_a_layout
def _bound(out: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, places: torch.Tensor) -> Launch:
    name, (count, size) = "combine_experts", out.shape
    check_rows(name, out=out)
    check_rows(name, x=x)
    check_alike(name, "x", x, out)
    check_contiguous(name, "shares", shares, (count, shares.shape[1]), out)
    check_contiguous(name, "places", places, tuple(shares.shape), out)
    if x.shape[1] != size or shares.dtype != torch.float32 or places.dtype != torch.int32:
        raise ValueError(f"{name}: x {tuple(x.shape)}, {shares.dtype} and {places.dtype} for out {tuple(out.shape)}")
    block, num_warps = part_of_row(size)
    return Launch(
        _combine_kernel,
        (count, cdiv(size, block)),
        (out.stride(0), x.stride(0)),
        SIZE=size,
        CHOSEN=shares.shape[1],
        BLOCK=block,
        num_warps=num_warps,
    )


def variants() -> Iterator[Variant]:
    """Mixtral's and Qwen3-MoE's, and a width that no tile divides."""
    for dtype, size, num_chosen in (("bf16", 4096, 2), ("bf16", 2048, 8), ("fp16", 2880, 4), ("fp32", 2048, 8)):
        block, num_warps = part_of_row(size)
        pointers = {"out": f"*{dtype}", "x": f"*{dtype}", "shares": "*fp32", "places": "*i32"}
        yield Variant(
            f"combine_experts {dtype} {num_chosen} of {size}",
            _combine_kernel,
            pointers | {"out_stride": "i32", "x_stride": "i32"},
            {"SIZE": size, "CHOSEN": num_chosen, "BLOCK": block},
            num_warps=num_warps,
            divisible_by_16=(*pointers, "out_stride", "x_stride"),
            may_spill=False,
        )
