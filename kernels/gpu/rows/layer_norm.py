"""LayerNorm (Ba et al. 2016, arXiv:1607.06450), with the residual sum in the same pass.

    out = (y - mean(y)) / sqrt(var(y) + eps) * weight + bias,  y = x or x + residual

    out, x, residual [T, n]    rows of adjacent elements, any stride between rows
    weight, bias [n]

A program holds whole rows in registers: each element is read once and written once, the variance is that of the
centred elements, and a row's sums are taken by the same tree whatever else is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, whole_rows
from kernels.gpu.variant import Variant


@triton.jit(do_not_specialize=["count"])  # one kernel for every number of rows
def _layer_norm_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    bias,
    residual,
    count,
    eps,
    out_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    mask = (row < count) & inside
    y = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        # Rounded before it is normed, as the residual that goes on is.
        rounded = (y + tl.load(place, mask, 0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, rounded, mask)
        y = rounded.to(tl.float32)
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    b = tl.load(bias + column, inside, 0.0).to(tl.float32)
    y = tl.where(inside, y - (tl.sum(y, axis=1) / SIZE)[:, None], 0.0)
    y *= tl.rsqrt(tl.sum(y * y, axis=1) / SIZE + eps)[:, None]
    tl.store(out + row * out_stride + column, (y * w + b).to(out.dtype.element_ty), mask)


def layer_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
) -> None:
    """See `reference.layer_norm`; rows of 32,768 elements at most. Raises ValueError for what does not fit."""
    tensors = out, x, weight, bias, residual
    _bound(tensors, eps)(*tensors)


@once_a_layout
def _bound(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
) -> Launch:
    check_rows("layer_norm", x=x, out=out, residual=residual)
    count, size = x.shape
    check_contiguous("layer_norm", "weight", weight, (size,), x)
    check_contiguous("layer_norm", "bias", bias, (size,), x)
    rows, block, num_warps = whole_rows(size)
    strides = out.stride(0), x.stride(0), 0 if residual is None else residual.stride(0)
    return Launch(
        _layer_norm_kernel,
        (cdiv(count, rows),),
        (count, eps, *strides),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps,
    )


def variants() -> Iterator[Variant]:
    """Hidden sizes that are powers of 2 and such that are not, to the widest."""
    cases = [("bf16", size, True) for size in (768, 4096, 14336, 32768)]
    cases += [("bf16", 128, False), ("fp16", 4096, True), ("fp32", 768, True), ("fp32", 4096, True)]
    for dtype, size, has_residual in cases:
        rows, block, num_warps = whole_rows(size)
        tensors = ["out", "x", "weight", "bias"] + ["residual"] * has_residual
        strides = ["out_stride", "x_stride"] + ["residual_stride"] * has_residual
        constants: dict[str, object] = {"SIZE": size, "ROWS": rows, "BLOCK": block, "HAS_RESIDUAL": has_residual}
        if not has_residual:
            constants |= {"residual": None, "residual_stride": 0}
        yield Variant(
            f"layer_norm {dtype} {size}{' residual' * has_residual}",
            _layer_norm_kernel,
            dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(["count", *strides], "i32") | {"eps": "fp32"},
            constants,
            num_warps=num_warps,
            divisible_by_16=(*tensors, *strides),
            may_spill=size == 32768,
        )
