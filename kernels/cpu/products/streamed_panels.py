"""What a thread does with one panel of floats: tiles of rows, whose sums are in registers while the panel streams by.

A processor with 32 registers of 16 numbers takes 8 rows by the panel's 48 columns at a time. One with 16 registers of 8
has no place for that: it takes 6 rows by 16 columns, three times. On a Zen 5 core told to be a Haswell, 512 rows by
3072 x 576 take 16.6 ms so, 27.7 by tiles of 2 rows and all columns, and 19.9 in oneDNN; 32 rows 1.46, 2.66 and 1.34.

Every sum runs over the inputs in order, one fused multiply-add after the other, whatever tile it is in.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from kernels.cpu.vectors.cache_prefetch import NONE, next_lines
from kernels.cpu.vectors.float_tile import (
    PANEL,
    STREAMED_ROWS,
    STREAMED_VECTORS,
    compile_multiply_add,
    compile_multiply_add_and_prefetch,
)
from kernels.cpu.vectors.processor import HAS_WIDE_REGISTERS
from kernels.cpu.vectors.vector_code import LANES

LEAST_PREFETCHING_ROWS = 4  # of a tile, and it is not the first: that one waits for the weight's own bytes
_NARROW_ROWS = 6

_stream_1, _stream_2, _stream_3, _stream_4, _stream_5, _stream_6, _stream_7, _stream_8 = (
    compile_multiply_add(rows, STREAMED_VECTORS, is_streamed=True) for rows in range(1, 9)
)
(
    _stream_and_prefetch_4,
    _stream_and_prefetch_5,
    _stream_and_prefetch_6,
    _stream_and_prefetch_7,
    _stream_and_prefetch_8,
) = (compile_multiply_add_and_prefetch(rows, STREAMED_VECTORS) for rows in range(LEAST_PREFETCHING_ROWS, 9))
_narrow_3, _narrow_4, _narrow_6 = (compile_multiply_add(rows, 1, is_streamed=True) for rows in (3, 4, _NARROW_ROWS))


@njit(nogil=True)
def _stream_wide(  # type: ignore[no-untyped-def]
    rows, a, a_offset, a_stride, panel, offset, s, s_offset, s_stride, c, c_offset, c_stride, depth, ahead, cursor
):
    """C[rows, 48] = S + A[rows, depth] . panel[depth, 48]; S as in `compile_multiply_add`.

    The first rows prefetch what lies `ahead` elements further, the others what the cursor of `cache_prefetch` says.
    """
    row, whole = 0, rows // 8 * 8
    while row < whole:  # by itself: together with the smaller tiles below each began 150 cycles later
        factors, weight = (a, a_offset + row * a_stride, a_stride), (panel, offset, PANEL)
        start, sums = (s, s_offset + row * s_stride, s_stride), (c, c_offset + row * c_stride, c_stride)
        lines = next_lines(cursor, depth) if cursor != NONE and (row > 0 or ahead == 0) else (0, 0, 0, 0, 0)
        if lines[-1] > 0:
            _stream_and_prefetch_8(*factors, *weight, *start, *sums, depth, *lines)
        else:
            _stream_8(*factors, *weight, *start, *sums, depth, ahead)
        row += 8
    left = rows - row
    if left == 0:
        return
    factors, weight = (a, a_offset + row * a_stride, a_stride), (panel, offset, PANEL)
    start, sums = (s, s_offset + row * s_stride, s_stride), (c, c_offset + row * c_stride, c_stride)
    lines = (0, 0, 0, 0, 0)
    if cursor != NONE and left >= LEAST_PREFETCHING_ROWS and (row > 0 or ahead == 0):
        lines = next_lines(cursor, depth)
    if lines[-1] > 0:
        if left == 7:
            _stream_and_prefetch_7(*factors, *weight, *start, *sums, depth, *lines)
        elif left == 6:
            _stream_and_prefetch_6(*factors, *weight, *start, *sums, depth, *lines)
        elif left == 5:
            _stream_and_prefetch_5(*factors, *weight, *start, *sums, depth, *lines)
        else:
            _stream_and_prefetch_4(*factors, *weight, *start, *sums, depth, *lines)
    elif left == 7:
        _stream_7(*factors, *weight, *start, *sums, depth, ahead)
    elif left == 6:
        _stream_6(*factors, *weight, *start, *sums, depth, ahead)
    elif left == 5:
        _stream_5(*factors, *weight, *start, *sums, depth, ahead)
    elif left == 4:
        _stream_4(*factors, *weight, *start, *sums, depth, ahead)
    elif left == 3:
        _stream_3(*factors, *weight, *start, *sums, depth, ahead)
    elif left == 2:
        _stream_2(*factors, *weight, *start, *sums, depth, ahead)
    else:
        _stream_1(*factors, *weight, *start, *sums, depth, ahead)


@njit(nogil=True)
def _stream_narrow(  # type: ignore[no-untyped-def]
    rows, a, a_offset, a_stride, panel, offset, s, s_offset, s_stride, c, c_offset, c_stride, depth, ahead, cursor
):
    """The same with fewer registers; nothing is prefetched but what lies `ahead`."""
    row = 0
    while row < rows:
        left = rows - row
        factors = a, a_offset + row * a_stride, a_stride
        if left < 3:
            weight = panel, offset, PANEL
            start, sums = (s, s_offset + row * s_stride, s_stride), (c, c_offset + row * c_stride, c_stride)
            if left == 2:
                _stream_2(*factors, *weight, *start, *sums, depth, ahead)
            else:
                _stream_1(*factors, *weight, *start, *sums, depth, ahead)
            row += left
            continue
        taken = _NARROW_ROWS if left >= _NARROW_ROWS else 4 if left >= 4 else 3
        for column in range(0, PANEL, LANES):
            weight = panel, offset + column, PANEL
            start = s, s_offset + row * s_stride + column, s_stride
            sums = c, c_offset + row * c_stride + column, c_stride
            if taken == _NARROW_ROWS:
                _narrow_6(*factors, *weight, *start, *sums, depth, ahead)
            elif taken == 4:
                _narrow_4(*factors, *weight, *start, *sums, depth, ahead)
            else:
                _narrow_3(*factors, *weight, *start, *sums, depth, ahead)
        row += taken


stream_add: Any = _stream_wide if HAS_WIDE_REGISTERS else _stream_narrow


@njit(nogil=True)
def num_prefetching_inputs(rows, num_weights):  # type: ignore[no-untyped-def]
    """How many inputs of tiles prefetch something, while so many rows are multiplied by so many float weights."""
    if not HAS_WIDE_REGISTERS:
        return 0
    num_tiles = rows // STREAMED_ROWS - 1 + (1 if rows % STREAMED_ROWS >= LEAST_PREFETCHING_ROWS else 0)
    return max(num_tiles, 0) * num_weights // PANEL
