"""The gate of a SwiGLU layer, its rows rounded to eight bits as the product behind it wants them: in one pass.

    rounded_rows(silu_and_mul(x)),  to the bit

A program rounds a whole row where all of it shares a scale that is yet to be found, and else a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.quantized.rounded_rows import rounded_rows, rounding_variant, store_rounded
from kernels.gpu.quantized.rounding import RoundedRows, Rounding, scales_stride
from kernels.gpu.rows.silu_and_mul import gated, silu_and_mul
from kernels.gpu.tiles import cdiv, part_of_row, whole_rows
from kernels.gpu.variant import Variant

_MOST = 16384  # elements of a whole row: a thread holds 16 of gates, and 16 of ups


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded_silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    given_scale,
    given_zero,
    scales_stride,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_BY_GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    x += row * x_stride + column
    y = gated(x, x + SIZE, column < SIZE).to(tl.float32)
    store_rounded(
        codes,
        scales,
        y,
        row,
        first,
        row >= 0,
        given_scale,
        given_zero,
        scales_stride,
        PADDED,
        IS_BY_GROUP,
        LARGEST,
        IS_GIVEN,
        HAS_ZERO,
    )


def rounded_silu_and_mul(x: torch.Tensor, rounding: Rounding) -> RoundedRows:
    """x [T, 2 n], as `silu_and_mul` takes it. Whole rows too long for a program are rounded by a second one. Raises
    ValueError for tensors that do not fit."""
    if rounding.size > _MOST and not rounding.is_by_group and rounding.scale is None:
        out = x.new_empty(len(x), rounding.size)
        silu_and_mul(out, x)
        return rounded_rows(out, rounding)
    launch = _bound((x,), *rounding.form)
    rows = rounding.empty(len(x), x)
    launch(rows.codes, rows.scales, x, *rounding.given)
    return rows


@once_a_layout
def _bound(x: torch.Tensor, *form: Any) -> Launch:
    rounding, count = Rounding(*form), len(x)
    if x.shape != (count, 2 * rounding.size):
        raise ValueError(f"rounded_silu_and_mul: x must be {(count, 2 * rounding.size)}, not {tuple(x.shape)}")
    check_rows("rounded_silu_and_mul", x=x)
    block, num_warps = _tile(rounding)
    return Launch(
        _rounded_silu_and_mul_kernel,
        (count, cdiv(rounding.padded, block)),
        (scales_stride(count), x.stride(0)),
        SIZE=rounding.size,
        BLOCK=block,
        IS_BY_GROUP=rounding.is_by_group,
        **rounding.constants,
        num_warps=num_warps,
    )


def _tile(rounding: Rounding) -> tuple[int, int]:
    """Elements and warps of a program."""
    if rounding.is_by_group or rounding.scale is not None:
        return part_of_row(rounding.padded)
    _, block, num_warps = whole_rows(rounding.padded)
    return block, max(block // 512, 1) if block < 2048 else num_warps


def variants() -> Iterator[Variant]:
    """Each way to round, with rows of each kind of tile."""
    cases = [
        (torch.int8, 14336, False, None, 0),
        (torch.int8, 14336, False, 1.0, 1),
        (torch.int8, 1536, False, None, 0),
    ]
    cases += [(torch.float8_e4m3fn, size, False, None, 0) for size in (1536, 6144, 14336, 300)]
    cases += [(torch.float8_e4m3fn, size, True, None, 0) for size in (768, 18432)]
    cases += [(torch.float8_e4m3fn, 28672, False, 1.0, 0)]
    for rounding in (Rounding(*case) for case in cases):
        block, num_warps = _tile(rounding)
        yield rounding_variant(
            "rounded_silu_and_mul",
            _rounded_silu_and_mul_kernel,
            rounding,
            {"x": "*bf16", "x_stride": "i32"},
            {"BLOCK": block, "IS_BY_GROUP": rounding.is_by_group},
            num_warps=num_warps,
        )
