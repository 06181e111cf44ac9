"""The gate of gpt-oss's experts (arXiv:2508.10925): a SwiGLU whose halves are cut off where they are large.

out = (u + 1) g sigmoid(alpha g),  g = min(gate, limit),  u = max(min(up, limit), -limit)

x [T, 2 n]    a row's gates and then its ups; rows at any stride
out [T, n]    rows at any stride
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv, part_of_row
from kernels.gpu.variant import Variant


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _clamped_swiglu_kernel(  # type: ignore[no-untyped-def]
    out, x, out_stride, x_stride, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    up = tl.load(x + row * x_stride + SIZE + column, mask).to(tl.float32)
    # Comparisons, as the least of a number and NaN may be the number.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask)


def clamped_swiglu(out: torch.Tensor, x: torch.Tensor, *, alpha: float, limit: float) -> None:
    """See `kernels.oracles.reference.clamped_swiglu`. Raises ValueError for tensors that do not fit."""
    _bound((out, x), alpha, limit)(out, x)


@once_a_layout
def _bound(out: torch.Tensor, x: torch.Tensor, alpha: float, limit: float) -> Launch:
    count, size = out.shape
    if x.shape != (count, 2 * size):
        raise ValueError(f"clamped_swiglu: x must be {(count, 2 * size)} for out {(count, size)}, not {tuple(x.shape)}")
    check_rows("clamped_swiglu", out=out, x=x[:, :size])
    block, num_warps = part_of_row(size)
    numbers = out.stride(0), x.stride(0), alpha, limit
    grid = count, cdiv(size, block)
    return Launch(_clamped_swiglu_kernel, grid, numbers, SIZE=size, BLOCK=block, num_warps=num_warps)


def variants() -> Iterator[Variant]:
    """gpt-oss's size in each type, half of it as two ranks have it, and one whose rows end within a tile."""
    for dtype, size in (("bf16", 2880), ("fp16", 2880), ("fp32", 2880), ("bf16", 1440), ("bf16", 10)):
        block, num_warps = part_of_row(size)
        yield Variant(
            f"clamped_swiglu {dtype} {size}",
            _clamped_swiglu_kernel,
            dict.fromkeys(["out", "x"], f"*{dtype}")
            | dict.fromkeys(["out_stride", "x_stride"], "i32")
            | dict.fromkeys(["alpha", "limit"], "fp32"),
            {"SIZE": size, "BLOCK": block},
            num_warps=num_warps,
            divisible_by_16=("out", "x") + ("out_stride", "x_stride") * (size % 16 == 0),
            may_spill=False,
        )
