"""Rows of activations, rounded to eight bits as they come: of formats whose authors measured them so.

    scale = max |x| / 127 or 448;   codes = x / scale, rounded to the nearest integer or number of E4M3, ties to even

    x [T, K]                        rows of adjacent elements at any stride
    codes [T, K rounded up]         int8 or float8_e4m3fn, that of 0 past the end
    scales f32[groups, T rounded up]  of a whole row or of 128 inputs; nothing of rows past the last

With a scale that is given it is that of all rows, and what is beyond becomes the largest number. Integers may then have
a zero, which is added before they are rounded: codes = x / scale + zero, within -128 and 127. A program rounds one row,
or 16 groups of one: a row's codes depend on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.quantized.rounding import GROUP, RoundedRows, Rounding, scales_stride
from kernels.gpu.tiles import MAX_ROW, cdiv, next_power_of_2
from kernels.gpu.variant import CAPABILITIES, Variant

_GROUPS = 16  # of a program
_ELEMENTS_OF_A_THREAD = 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded_rows_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    given_scale,
    given_zero,
    scales_stride,
    x_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    y = tl.load(x + row * x_stride + column, column < SIZE, 0.0).to(tl.float32)
    if IS_GIVEN:
        y = codes_of(y, given_scale, given_zero, codes.dtype.element_ty, LARGEST, HAS_ZERO)
    else:
        scale = scale_of(tl.max(magnitude(y), axis=1), LARGEST)
        tl.store(scales + group.to(tl.int64) * scales_stride + row, scale, group * BLOCK < PADDED)
        y = codes_of(y, scale[:, None], given_zero, codes.dtype.element_ty, LARGEST, HAS_ZERO)
    tl.store(codes + row * PADDED + column, y, column < PADDED)


@triton.jit
def magnitude(y):  # type: ignore[no-untyped-def]
    """NaN counts as infinite: neither may become a number that looks like others."""
    return tl.where(y != y, float("inf"), tl.abs(y))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def scale_of(largest, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of numbers up to a magnitude; `LARGEST`: code."""
    return tl.div_rn(tl.where(largest == 0.0, LARGEST, largest), LARGEST)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def codes_of(y, scale, zero, dtype: tl.constexpr, LARGEST: tl.constexpr, HAS_ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """See the top of this file."""
    y = tl.div_rn(y, scale)
    if HAS_ZERO:
        y = tl.clamp(y + zero, -128.0, 127.0)
    else:
        y = tl.clamp(y, -LARGEST, LARGEST)
    if dtype == tl.int8:
        y = (y + 12582912.0) - 12582912.0  # 1.5 x 2^23, beyond which float32 has integers alone
    else:
        y = _rounded_to_e4m3(y)
    return y.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def store_rounded(  # type: ignore[no-untyped-def]
    codes,
    scales,
    y,
    row,
    first,
    mask,
    given_scale,
    given_zero,
    scales_stride,
    PADDED: tl.constexpr,
    IS_BY_GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """For kernels that round what they have computed: y f32[R, C] of rows [R, 1] and C columns from `first` on,
    zeros past the end; `mask` [R, 1] of rows. C are whole rows, or whole groups where no scale of a whole row is to be
    found."""
    dtype: tl.constexpr = codes.dtype.element_ty
    groups: tl.constexpr = y.shape[1] // 128
    # By groups of 128 in any case: Triton gives accesses of one shape one layout, and were codes [R, C] like what y was
    # summed from, eight bits would ask for another order of that sum than 16 do.
    shape: tl.constexpr = (y.shape[0], groups, 128)
    group = first // 128 + tl.arange(0, groups)[None, :]
    k = group[:, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    if IS_GIVEN:
        y = codes_of(tl.reshape(y, shape), given_scale, given_zero, dtype, LARGEST, HAS_ZERO)
    elif IS_BY_GROUP:
        y = tl.reshape(y, shape)
        scale = scale_of(tl.max(magnitude(y), axis=2), LARGEST)
        tl.store(scales + group.to(tl.int64) * scales_stride + row, scale, mask & (group * 128 < PADDED))
        y = codes_of(y, scale[:, :, None], given_zero, dtype, LARGEST, HAS_ZERO)
    else:
        scale = scale_of(tl.max(magnitude(y), axis=1), LARGEST)[:, None]
        tl.store(scales + row, scale, mask)
        y = codes_of(tl.reshape(y, shape), scale[:, :, None], given_zero, dtype, LARGEST, HAS_ZERO)
    tl.store(codes + row[:, :, None] * PADDED + k, y, mask[:, :, None] & (k < PADDED))


@triton.jit
def _rounded_to_e4m3(y):  # type: ignore[no-untyped-def]
    """As cards round, which Triton's interpreter does not: to three bits behind the first, or multiples of 2^-9."""
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


def rounded_rows(x: torch.Tensor, rounding: Rounding) -> RoundedRows:
    """x [T, K]; see the top of this file. Whole rows have 32,768 elements at most. Inputs past the end have the code of
    the number 0."""
    launch = _bound((x,), *rounding.form)
    rows = rounding.empty(len(x), x)
    launch(rows.codes, rows.scales, x, *rounding.given)
    return rows


@once_a_layout
def _bound(x: torch.Tensor, *form: Any) -> Launch:
    rounding, count = Rounding(*form), len(x)
    block, groups = (GROUP, _GROUPS) if rounding.is_by_group else (next_power_of_2(rounding.padded), 1)
    return Launch(
        _rounded_rows_kernel,
        (count, cdiv(cdiv(rounding.padded, block), groups)),
        (scales_stride(count), x.stride(0)),
        SIZE=rounding.size,
        GROUPS=groups,
        BLOCK=block,
        **rounding.constants,
        num_warps=_num_warps(groups * block),
    )


def fits(size: int) -> bool:
    """Whether whole rows of so many elements can be rounded."""
    return size <= MAX_ROW


def _num_warps(elements: int) -> int:
    return min(max(elements // (32 * _ELEMENTS_OF_A_THREAD), 1), 32)


def variants() -> Iterator[Variant]:
    """Both types by rows, E4M3 by groups too, and a scale that is given, with a zero or without."""
    cases = [(torch.int8, 4096, False, None, 0), (torch.int8, 14336, False, 1.0, 0), (torch.int8, 4096, False, 1.0, 1)]
    cases += [(torch.float8_e4m3fn, size, False, None, 0) for size in (14336, 584)]
    cases += [(torch.float8_e4m3fn, 7168, True, None, 0), (torch.float8_e4m3fn, 4096, False, 1.0, 0)]
    for rounding in (Rounding(*case) for case in cases):
        block, groups = (GROUP, _GROUPS) if rounding.is_by_group else (next_power_of_2(rounding.padded), 1)
        yield rounding_variant(
            "rounded_rows",
            _rounded_rows_kernel,
            rounding,
            {"x": "*bf16", "x_stride": "i32"},
            {"GROUPS": groups, "BLOCK": block},
            num_warps=_num_warps(groups * block),
        )


def rounding_variant(
    name: str,
    kernel: Any,
    rounding: Rounding,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    num_warps: int,
) -> Variant:
    """Of a kernel that rounds rows; `signature` and `constants` without what all such kernels have."""
    is_int8, is_given = rounding.dtype == torch.int8, rounding.scale is not None
    pointers = {"codes": "*i8" if is_int8 else "*fp8e4nv"} | ({} if is_given else {"scales": "*fp32"})
    numbers = {"given_scale": "fp32", "given_zero": "fp32", "scales_stride": "i32"}
    wide = ["x_stride", "residual_stride"] * (rounding.size % 16 == 0)
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name in wide]
    kind = " by group" * rounding.is_by_group + " static" * is_given + " with zero" * (rounding.zero != 0)
    return Variant(
        f"{name} {pointers['codes'][1:]} {rounding.size}{kind}",
        kernel,
        {**pointers, **signature, **numbers},
        ({"scales": None} if is_given else {}) | dict(constants) | {"SIZE": rounding.size} | rounding.constants,
        num_warps=num_warps,
        divisible_by_16=(*pointers, "scales_stride", *aligned),
        may_spill=False,
        capabilities=CAPABILITIES if is_int8 else range(89, 130),
    )
