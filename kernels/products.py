"""The inner loop of kernels that multiply rows by a weight, of which each element is read once a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_sum(  # type: ignore[no-untyped-def]
    x,
    weight,
    segment,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """f32[BLOCK_M, BLOCK_N]: over segment `segment` of a row's SIZE elements, the products of rows and outputs.

    x: addresses of rows [BLOCK_M, 1]; weight: addresses of outputs [1, BLOCK_N]; elements of either are adjacent.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = segment * SEGMENT
    for start in range(first, tl.minimum(first + SEGMENT, SIZE), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if SIZE % BLOCK_K == 0:
            a = tl.load(x + k[None, :])
            b = tl.load(weight + k[:, None])
        else:
            a = tl.load(x + k[None, :], k[None, :] < SIZE, 0.0)
            b = tl.load(weight + k[:, None], k[:, None] < SIZE, 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total
