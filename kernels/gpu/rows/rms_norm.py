"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual sum in the same pass.

    out = y / sqrt(mean(y^2) + eps) * weight,  y = x or x + residual;  weight + offset in place of weight

    out, x, residual [T, n]    rows of adjacent elements, any stride between rows
    weight [n]

A program holds whole rows in registers: each element is read once and written once, and a row is summed by the same
tree whatever else is computed, so that its result depends on nothing beside it.
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
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    residual,
    count,
    eps,
    weight_offset,
    out_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (column < SIZE)
    y = normed(
        x + row * x_stride + column,
        weight + column,
        residual + row * residual_stride + column if HAS_RESIDUAL else None,
        mask,
        column < SIZE,
        eps,
        weight_offset,
        SIZE,
        HAS_OFFSET,
    )
    tl.store(out + row * out_stride + column, y, mask)


@triton.jit
def normed(x, weight, residual, mask, is_weighed, eps, weight_offset, SIZE: tl.constexpr, HAS_OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the type of `x` whose numbers are at these places [rows, elements], `mask` of them; the sum is stored
    where `residual` is, None where there is none. `weight`, `is_weighed` [1, elements]."""
    dtype: tl.constexpr = x.dtype.element_ty
    y = tl.load(x, mask, 0.0).to(tl.float32)
    if residual is not None:
        # Rounded before it is normed, as the residual that goes on is.
        rounded = (y + tl.load(residual, mask, 0.0).to(tl.float32)).to(dtype)
        tl.store(residual, rounded, mask)
        y = rounded.to(tl.float32)
    w = tl.load(weight, is_weighed, 0.0).to(tl.float32)
    # Squares are rounded before they are added: of a product and a sum a compiler may make one operation in one kernel
    # and two in another, and kernels that round what is normed here are to have the bits of this one.
    squares = tl.fma(y, y, tl.zeros_like(y))
    y *= tl.rsqrt(tl.sum(squares, axis=1) / SIZE + eps)[:, None]
    if HAS_OFFSET:
        y *= w + weight_offset
    else:
        y = y.to(dtype).to(tl.float32) * w
    return y.to(dtype)


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """See `reference.rms_norm`; rows of 32,768 elements at most. Raises ValueError for what does not fit."""
    tensors = out, x, weight, residual
    _bound(tensors, eps, weight_offset)(*tensors)


@once_a_layout
def _bound(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> Launch:
    check_rows("rms_norm", x=x, out=out, residual=residual)
    count, size = x.shape
    check_contiguous("rms_norm", "weight", weight, (size,), x)
    rows, block, num_warps = whole_rows(size)
    strides = out.stride(0), x.stride(0), 0 if residual is None else residual.stride(0)
    return Launch(
        _rms_norm_kernel,
        (cdiv(count, rows),),
        (count, eps, weight_offset, *strides),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_OFFSET=weight_offset != 0.0,
        num_warps=num_warps,
    )


def variants() -> Iterator[Variant]:
    """Heads, hidden sizes that are powers of 2 and such that are not, to the widest."""
    cases = [("bf16", size, True, False) for size in (576, 1024, 4096, 5120, 16384, 32768)]
    cases += [("bf16", 128, False, False), ("bf16", 2304, True, True), ("fp16", 4096, True, False)]
    cases += [("fp32", size, True, False) for size in (576, 4096, 32768)]
    for dtype, size, has_residual, has_offset in cases:
        rows, block, num_warps = whole_rows(size)
        tensors = ["out", "x", "weight"] + ["residual"] * has_residual
        strides = ["out_stride", "x_stride"] + ["residual_stride"] * has_residual
        constants: dict[str, object] = {"SIZE": size, "ROWS": rows, "BLOCK": block, "HAS_RESIDUAL": has_residual}
        if not has_residual:
            constants |= {"residual": None, "residual_stride": 0}
        yield Variant(
            f"rms_norm {dtype} {size}{' residual' * has_residual}{' offset' * has_offset}",
            _rms_norm_kernel,
            dict.fromkeys(tensors, f"*{dtype}")
            | dict.fromkeys(["count", *strides], "i32")
            | dict.fromkeys(["eps", "weight_offset"], "fp32"),
            constants | {"HAS_OFFSET": has_offset},
            num_warps=num_warps,
            divisible_by_16=(*tensors, *strides),
            may_spill=(dtype, size) == ("fp32", 32768),  # 64 registers a thread are all there are
        )
