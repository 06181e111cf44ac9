"""RMSNorm, its rows rounded to eight bits as the product behind it wants them: in one pass, and no other rows stored.

rounded_rows(rms_norm(x, residual, weight)),  to the bit
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.quantized.rounded_rows import rounding_variant, store_rounded
from kernels.gpu.quantized.rounding import RoundedRows, Rounding, scales_stride
from kernels.gpu.rows.rms_norm import normed
from kernels.gpu.tiles import cdiv, whole_rows
from kernels.gpu.variant import Variant


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded_rms_norm_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    weight,
    residual,
    given_scale,
    given_zero,
    count,
    eps,
    weight_offset,
    scales_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_BY_GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    HAS_ZERO: tl.constexpr,
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
    # A row that is no number has none past its end either, where products expect zeros.
    y = tl.where(column < SIZE, y.to(tl.float32), 0.0)
    store_rounded(
        codes,
        scales,
        y,
        row,
        0,
        row < count,
        given_scale,
        given_zero,
        scales_stride,
        PADDED,
        IS_BY_GROUP,
        LARGEST,
        IS_GIVEN,
        HAS_ZERO,
    )


def rounded_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    rounding: Rounding,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> RoundedRows:
    """As `rms_norm`, whose `out` would be rounded. Raises ValueError for what does not fit."""
    launch = _bound((x, weight, residual), eps, weight_offset, *rounding.form)
    rows = rounding.empty(len(x), x)
    launch(rows.codes, rows.scales, x, weight, residual, *rounding.given)
    return rows


@once_a_layout
def _bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *form: Any,
) -> Launch:
    rounding = Rounding(*form)
    check_rows("rounded_rms_norm", x=x, residual=residual)
    count, size = x.shape
    if size != rounding.size:
        raise ValueError(f"rounded_rms_norm: rows of {size} for a product with {rounding.size} inputs")
    check_contiguous("rounded_rms_norm", "weight", weight, (size,), x)
    rows, block, num_warps = whole_rows(rounding.padded)
    return Launch(
        _rounded_rms_norm_kernel,
        (cdiv(count, rows),),
        (count, eps, weight_offset, scales_stride(count), x.stride(0), 0 if residual is None else residual.stride(0)),
        SIZE=size,
        ROWS=rows,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_OFFSET=weight_offset != 0.0,
        IS_BY_GROUP=rounding.is_by_group,
        **rounding.constants,
        num_warps=num_warps,
    )


def variants() -> Iterator[Variant]:
    """Each way to round, and hidden sizes to the widest."""
    cases = [(torch.int8, 4096, False, None, 0), (torch.int8, 4096, False, 1.0, 1)]
    cases += [(torch.float8_e4m3fn, size, False, None, 0) for size in (576, 4096, 16384)]
    cases += [(torch.float8_e4m3fn, size, True, None, 0) for size in (2048, 7168)]
    cases += [(torch.float8_e4m3fn, 4096, False, 1.0, 0)]
    for rounding in (Rounding(*case) for case in cases):
        rows, block, num_warps = whole_rows(rounding.padded)
        yield rounding_variant(
            "rounded_rms_norm",
            _rounded_rms_norm_kernel,
            rounding,
            dict.fromkeys(["x", "weight", "residual"], "*bf16")
            | dict.fromkeys(["count", "x_stride", "residual_stride"], "i32")
            | dict.fromkeys(["eps", "weight_offset"], "fp32"),
            {"ROWS": rows, "BLOCK": block, "HAS_RESIDUAL": True, "HAS_OFFSET": False}
            | {"IS_BY_GROUP": rounding.is_by_group},
            num_warps=num_warps,
        )
