"""What kernels share that multiply rows by a weight: which tile a program has, and the loop over a row's elements."""

from __future__ import annotations

import triton
import triton.language as tl

_ROW_TILES = tl.constexpr(
    8
)  # that pass over the same part of a weight one after the other, while it is in the L2 cache


@triton.jit
def tile_of_program(row_tiles, COLUMN_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile of rows, tile of outputs) of this program, of a grid with one for each in its first dimension."""
    program = tl.program_id(0)
    return tl.swizzle2d(program // COLUMN_TILES, program % COLUMN_TILES, row_tiles, COLUMN_TILES, _ROW_TILES)


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
    has_tail: tl.constexpr = SIZE % SEGMENT != 0 or SEGMENT % BLOCK_K != 0  # the last segment is shorter, or its tile
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((min(SEGMENT, SIZE) + BLOCK_K - 1) // BLOCK_K):
        total = add_product(total, x, weight, segment * SEGMENT + step * BLOCK_K, SIZE, BLOCK_K, has_tail)
    return total


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    total, x, weight, first, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, HAS_TAIL: tl.constexpr
):
    """`total` and the products of rows and outputs over the elements first..first + BLOCK_K; those past SIZE are 0, for
    which HAS_TAIL says that there may be some."""
    k = first + tl.arange(0, BLOCK_K)
    if HAS_TAIL:
        a = tl.load(x + k[None, :], k[None, :] < SIZE, 0.0)
        b = tl.load(weight + k[:, None], k[:, None] < SIZE, 0.0)
    else:
        a = tl.load(x + k[None, :])
        b = tl.load(weight + k[:, None])
    return tl.dot(a, b, total, input_precision="ieee")
