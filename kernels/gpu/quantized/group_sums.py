"""The sums of groups of inputs, by which weights with an offset are corrected.

    sums[g, t] = x[t, g * group] + ... + x[t, (g + 1) * group - 1]

    x [T, K]                          rows of adjacent elements at any stride
    sums f32[groups, T rounded up]    zeros of groups past the end of a row, nothing of rows past the last

A kernel of its own rather than a part of the product: there the order of a sum would follow from the tile of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import Variant

_GROUPS = 64  # of a program: 2,048 elements where a group has 32


@triton.jit(do_not_specialize=["sums_stride"])  # type: ignore[untyped-decorator]  # Triton has no types
def _group_sums_kernel(  # type: ignore[no-untyped-def]
    sums,
    x,
    sums_stride,
    x_stride,
    ALL: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * x_stride + column, column < SIZE, 0.0).to(tl.float32)
    tl.store(sums + group.to(tl.int64) * sums_stride + row, tl.sum(values, axis=1), group < ALL)


def group_sums(x: torch.Tensor, group: int, num_groups: int, multiple: int) -> torch.Tensor:
    """See the top of this file; `group` is a power of 2, `multiple` what rows are rounded up to."""
    sums = x.new_empty((num_groups, cdiv(len(x), multiple) * multiple), dtype=torch.float32)
    _bound((sums, x), group)(sums, x)
    return sums


@once_a_layout
def _bound(sums: torch.Tensor, x: torch.Tensor, group: int) -> Launch:
    (count, size), num_groups = x.shape, len(sums)
    sizes = {"ALL": num_groups, "SIZE": size, "GROUP": group, "GROUPS": _GROUPS}
    return Launch(_group_sums_kernel, (count, cdiv(num_groups, _GROUPS)), (sums.stride(0), x.stride(0)), **sizes)


def variants() -> Iterator[Variant]:
    """Groups of Q4_K, in each type."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield Variant(
            f"group_sums {dtype}",
            _group_sums_kernel,
            {"sums": "*fp32", "x": f"*{dtype}", "sums_stride": "i32", "x_stride": "i32"},
            {"ALL": 128, "SIZE": 4096, "GROUP": 32, "GROUPS": _GROUPS},
            divisible_by_16=("sums", "x", "x_stride"),
            may_spill=False,
        )
