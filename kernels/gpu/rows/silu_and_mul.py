"""The gate of a SwiGLU layer (Shazeer 2020, arXiv:2002.05202).

out = silu(gate) * up,  silu(g) = g / (1 + e^-g)

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


@triton.jit
def _silu_and_mul_kernel(out, x, out_stride, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    x += row * x_stride + column
    tl.store(out + row * out_stride + column, gated(x, x + SIZE, mask), mask)


@triton.jit
def gated(gate, up, mask):  # type: ignore[no-untyped-def]
    """Of the type of what is at these places; 0 where nothing is."""
    x = tl.load(gate, mask, 0.0).to(tl.float32)
    y = x * tl.sigmoid(x) * tl.load(up, mask, 0.0).to(tl.float32)
    return y.to(gate.dtype.element_ty)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """See `kernels.oracles.reference.silu_and_mul`. Raises ValueError for tensors that do not fit."""
    _bound((out, x))(out, x)


@once_a_layout
def _bound(out: torch.Tensor, x: torch.Tensor) -> Launch:
    count, size = out.shape
    if x.shape != (count, 2 * size):
        raise ValueError(f"silu_and_mul: x must be {(count, 2 * size)} for out {(count, size)}, not {tuple(x.shape)}")
    check_rows("silu_and_mul", out=out, x=x[:, :size])
    block, num_warps = part_of_row(size)
    grid, strides = (count, cdiv(size, block)), (out.stride(0), x.stride(0))
    return Launch(_silu_and_mul_kernel, grid, strides, SIZE=size, BLOCK=block, num_warps=num_warps)


def variants() -> Iterator[Variant]:
    """A size of each tile, and one whose rows end within a tile."""
    for dtype, size in [
        ("bf16", 1536),
        ("bf16", 6144),
        ("bf16", 14336),
        ("fp16", 14336),
        ("fp32", 14336),
        ("bf16", 10),
    ]:
        block, num_warps = part_of_row(size)
        yield Variant(
            f"silu_and_mul {dtype} {size}",
            _silu_and_mul_kernel,
            dict.fromkeys(["out", "x"], f"*{dtype}") | dict.fromkeys(["out_stride", "x_stride"], "i32"),
            {"SIZE": size, "BLOCK": block},
            num_warps=num_warps,
            divisible_by_16=("out", "x") + ("out_stride", "x_stride") * (size % 16 == 0),
            may_spill=False,
        )
