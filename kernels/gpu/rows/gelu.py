"""GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), alone or as a layer's gate (Shazeer 2020, arXiv:2002.05202).

out = gelu(x)    or    out = gelu(gate) * up

gelu(x) = x (1 + erf(x / sqrt(2))) / 2    or, as most models were trained with it,
gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)

x [T, n], gated [T, 2 n]    a row's gates and then its ups; rows at any stride
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
def _gelu(x, IS_APPROXIMATE: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_APPROXIMATE:
        # 2 sqrt(2 / pi) = 1.59576912...
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    # 1 / sqrt(2) = 0.70710678...
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    out_stride,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_APPROXIMATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    y = _gelu(tl.load(x + row * x_stride + column, mask).to(tl.float32), IS_APPROXIMATE)
    if IS_GATED:
        y *= tl.load(x + row * x_stride + SIZE + column, mask).to(tl.float32)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask)


def gelu(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu`; `out` may be `x`. Raises ValueError for tensors that do not fit."""
    _bound((out, x), False, is_approximate)(out, x)


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """See `kernels.oracles.reference.gelu_and_mul`. Raises ValueError for tensors that do not fit."""
    _bound((out, x), True, is_approximate)(out, x)


@once_a_layout
def _bound(out: torch.Tensor, x: torch.Tensor, is_gated: bool, is_approximate: bool) -> Launch:
    (count, size), name = out.shape, "gelu_and_mul" if is_gated else "gelu"
    if is_gated and x.shape != (count, 2 * size):
        raise ValueError(f"{name}: x must be {(count, 2 * size)} for out {(count, size)}, not {tuple(x.shape)}")
    check_rows(name, out=out, x=x[:, :size] if is_gated else x)
    block, num_warps = part_of_row(size)
    return Launch(
        _gelu_kernel,
        (count, cdiv(size, block)),
        (out.stride(0), x.stride(0)),
        SIZE=size,
        BLOCK=block,
        IS_GATED=is_gated,
        IS_APPROXIMATE=is_approximate,
        num_warps=num_warps,
    )


def variants() -> Iterator[Variant]:
    """Both formulas, gated and not, in each type; and a row that ends within a tile."""
    cases = [("bf16", 16384, is_gated, is_near) for is_gated in (False, True) for is_near in (False, True)]
    cases += [("fp16", 16384, True, True), ("fp32", 16384, True, False), ("bf16", 3072, False, True)]
    for dtype, size, is_gated, is_approximate in cases:
        block, num_warps = part_of_row(size)
        yield Variant(
            f"gelu{'_and_mul' * is_gated} {'tanh' if is_approximate else 'erf'} {dtype} {size}",
            _gelu_kernel,
            dict.fromkeys(["out", "x"], f"*{dtype}") | dict.fromkeys(["out_stride", "x_stride"], "i32"),
            {"SIZE": size, "BLOCK": block, "IS_GATED": is_gated, "IS_APPROXIMATE": is_approximate},
            num_warps=num_warps,
            divisible_by_16=("out", "x", "out_stride", "x_stride"),
            may_spill=False,
        )
