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

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import MAX_ROW, cdiv, next_power_of_2
from kernels.gpu.variant import Variant

GROUP = 128  # inputs that share a scale where not all of a row do
_GROUPS = 16  # of a program
_ELEMENTS_OF_A_THREAD = 16
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


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
    if HAS_ZERO:
        y = tl.clamp(tl.div_rn(y, given_scale) + given_zero, -128.0, 127.0)
    elif IS_GIVEN:
        y = tl.clamp(tl.div_rn(y, given_scale), -LARGEST, LARGEST)
    else:
        # NaN counts as infinite: neither may become a number that looks like others.
        largest = tl.max(tl.where(y != y, float("inf"), tl.abs(y)), axis=1)
        scale = tl.div_rn(tl.where(largest == 0.0, LARGEST, largest), LARGEST)
        tl.store(scales + group.to(tl.int64) * scales_stride + row, scale, group * BLOCK < PADDED)
        y = tl.clamp(tl.div_rn(y, scale[:, None]), -LARGEST, LARGEST)
    if codes.dtype.element_ty == tl.int8:
        y = (y + 12582912.0) - 12582912.0  # 1.5 x 2^23, beyond which float32 has integers alone
    else:
        y = _rounded_to_e4m3(y)
    tl.store(codes + row * PADDED + column, y.to(codes.dtype.element_ty), column < PADDED)


@triton.jit
def _rounded_to_e4m3(y):  # type: ignore[no-untyped-def]
    """As cards round, which Triton's interpreter does not: to three bits behind the first, or multiples of 2^-9."""
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


def rounded_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    padded: int,
    *,
    group: int,
    scale: float | None,
    zero: int = 0,
    multiple: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales; see the top of this file. `padded`: K rounded up; `group`: 0 for whole rows, of 32,768 elements
    at most, or 128; `scale` of all rows, where there are no others, and `zero`; `multiple`: what rows' scales are
    rounded up to. Inputs past the end have the code of the number 0."""
    is_given = scale is not None
    launch, shape_of_scales = _bound((x,), dtype, padded, group, is_given, zero != 0, multiple)
    codes = x.new_empty((len(x), padded), dtype=dtype)
    scales = None if is_given else x.new_empty(shape_of_scales, dtype=torch.float32)
    launch(codes, scales, x, 0.0 if scale is None else scale, float(zero))
    return codes, scales


@once_a_layout
def _bound(
    x: torch.Tensor, dtype: torch.dtype, padded: int, group: int, is_given: bool, has_zero: bool, multiple: int
) -> tuple[Launch, tuple[int, int]]:
    """And the shape of the scales."""
    count, size = x.shape
    block, groups = group or next_power_of_2(padded), _GROUPS if group else 1
    num_groups, width = cdiv(padded, block), cdiv(count, multiple) * multiple
    launch = Launch(
        _rounded_rows_kernel,
        (count, cdiv(num_groups, groups)),
        (width, x.stride(0)),
        SIZE=size,
        PADDED=padded,
        GROUPS=groups,
        BLOCK=block,
        LARGEST=_LARGEST[dtype],
        IS_GIVEN=is_given,
        HAS_ZERO=has_zero,
        num_warps=_num_warps(groups * block),
    )
    return launch, (num_groups, width)


def fits(size: int) -> bool:
    """Whether whole rows of so many elements can be rounded."""
    return size <= MAX_ROW


def _num_warps(elements: int) -> int:
    return min(max(elements // (32 * _ELEMENTS_OF_A_THREAD), 1), 32)


def variants() -> Iterator[Variant]:
    """Both types by rows, E4M3 by groups too, and a scale that is given, with a zero or without."""
    plain, static, shifted = "", " static", " static with zero"
    cases = [("i8", 4096, 0, plain), ("i8", 14336, 0, static), ("fp8e4nv", 14336, 0, plain), ("fp8e4nv", 584, 0, plain)]
    cases += [("fp8e4nv", 7168, GROUP, plain), ("fp8e4nv", 4096, 0, static), ("i8", 4096, 0, shifted)]
    for dtype, size, group, kind in cases:
        is_given = kind != plain
        padded = triton.cdiv(size, 128) * 128
        block, groups = group or triton.next_power_of_2(padded), _GROUPS if group else 1
        pointers = {"codes": f"*{dtype}", "x": "*bf16"} | ({} if is_given else {"scales": "*fp32"})
        yield Variant(
            f"rounded_rows {dtype} {size}{' by group' * (group > 0)}{kind}",
            _rounded_rows_kernel,
            pointers | {"given_scale": "fp32", "given_zero": "fp32", "scales_stride": "i32", "x_stride": "i32"},
            ({"scales": None} if is_given else {})
            | {"SIZE": size, "PADDED": padded, "GROUPS": groups, "BLOCK": block}
            | {"LARGEST": 127.0 if dtype == "i8" else 448.0, "IS_GIVEN": is_given, "HAS_ZERO": kind == shifted},
            num_warps=_num_warps(groups * block),
            divisible_by_16=(*pointers, "scales_stride", *["x_stride"] * (size % 16 == 0)),
            may_spill=False,
            capabilities=range(89, 130) if dtype == "fp8e4nv" else range(75, 130),
        )
