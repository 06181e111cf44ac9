"""What a thread does with one panel of a packed weight, whichever way that is kept; the same bits from each.

sums[r, c] = start[c] + sum_k x[r, k] W[48 panel + c, k]        k in order, one fused multiply-add after the other
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import extending

from kernels.cpu.products.few_bits import GROUP
from kernels.cpu.products.few_bits_tile import FORMAT_OF, MOST_ROWS, multiply_add, multiply_add_and_write, record_bytes
from kernels.cpu.products.streamed_panels import stream_add
from kernels.cpu.vectors.float_tile import PANEL, STREAMED_ROWS
from kernels.cpu.vectors.numbers import FLOAT32, address_of, lines
from kernels.cpu.vectors.vector_code import CACHE_LINE_BYTES, LANES

_DEPTH = 2048  # of a panel that is multiplied by all rows before the next: it stays in a second cache level of 1 MiB
# Of a panel that is written out as float32 at a time: 36 KiB, in the first cache level. On one core 16 rows by
# 3072 x 576 take 286 us, and 295 with 128; 232 rows 3,469 and 3,518.
_EXPANDED_DEPTH = 192
# How far up to 8 rows ask ahead of what they read, from panel to panel and past the end of a thread's share. One row by
# 49152 x 576 of 8 bits out of memory takes two threads 678 us, and 792 by two panels at once that lie side by side: the
# processor follows one stream of memory better than two.
_AHEAD_BYTES = 8 << 10


def add_panel(  # type: ignore[no-untyped-def]
    element: Any, rows, x, x_stride, packed, panel, has_next, start, sums, sums_stride, depth, cursor
) -> None:
    """Multiplies by a panel; for compiled code alone.

    element: how the weight is kept (`element_of_packed`); x, packed, start [48] and sums [rows, 48]: addresses, strides
    in numbers. `has_next`: the thread goes on with the panel that comes next, which is prefetched meanwhile; so is what
    `cursor` says (`cache_prefetch`), where there are more rows than a tile has.
    """
    raise NotImplementedError


@extending.overload(add_panel, jit_options={"nogil": True})
def _add_panel(  # type: ignore[no-untyped-def]
    element: Any, rows, x, x_stride, packed, panel, has_next, start, sums, sums_stride, depth, cursor
) -> Any:
    return _add_few_bits if element in FORMAT_OF else _add_floats


def _add_floats(  # type: ignore[no-untyped-def]
    element: Any, rows, x, x_stride, packed, panel, has_next, start, sums, sums_stride, depth, cursor
) -> None:
    factors, totals = lines(x, FLOAT32, 1, rows * x_stride)[0], lines(sums, FLOAT32, 1, rows * sums_stride)[0]
    starts = lines(start, FLOAT32, 1, PANEL)[0]
    weight = lines(packed, element, 1, (panel + 1) * depth * PANEL)[0]
    ahead = depth * PANEL if has_next else 0
    for k in range(0, depth, _DEPTH):
        part = weight, (panel * depth + k) * PANEL
        before, before_stride = (starts, 0) if k == 0 else (totals, sums_stride)
        sums_of = before, 0, before_stride, totals, 0, sums_stride
        stream_add(rows, factors, k, x_stride, *part, *sums_of, min(_DEPTH, depth - k), ahead, cursor)


def _add_few_bits(  # type: ignore[no-untyped-def]
    element: Any, rows, x, x_stride, packed, panel, has_next, start, sums, sums_stride, depth, cursor
) -> None:
    record = record_bytes(element)
    panel_bytes = depth // GROUP * record
    weight = packed + panel * panel_bytes
    if rows <= MOST_ROWS:
        multiply_add(element, rows, x, x_stride * 4, weight, start, sums, sums_stride * 4, depth // GROUP, _AHEAD_BYTES)
        return
    ahead = panel_bytes if has_next else 0
    first, size = STREAMED_ROWS, min(_EXPANDED_DEPTH, depth) * PANEL
    memory = np.empty(size + rows * PANEL + LANES, dtype=np.float32)
    aligned = memory[-address_of(memory) % CACHE_LINE_BYTES // 4 :]  # a vector in two lines takes twice as long
    # Sums wait for the next piece side by side: the first cache level has no place for 32 lines that lie 12 KiB apart,
    # which made 64 rows by 3072 x 576 in place 5% slower.
    scratch, waiting = aligned[:size], aligned[size:]
    factors, starts = lines(x, FLOAT32, 1, rows * x_stride)[0], lines(start, FLOAT32, 1, PANEL)[0]
    totals = lines(sums, FLOAT32, 1, rows * sums_stride)[0]
    for k in range(0, depth, _EXPANDED_DEPTH):
        piece = min(_EXPANDED_DEPTH, depth - k)
        s, s_stride = (starts, 0) if k == 0 else (waiting, PANEL)
        c, c_stride = (waiting, PANEL) if k + piece < depth else (totals, sums_stride)
        at_once = address_of(s), s_stride * 4, address_of(c), c_stride * 4, piece // GROUP, ahead, address_of(scratch)
        multiply_add_and_write(element, x + k * 4, x_stride * 4, weight + k // GROUP * record, *at_once)
        others = s, first * s_stride, s_stride, c, first * c_stride, c_stride
        stream_add(rows - first, factors, first * x_stride + k, x_stride, scratch, 0, *others, piece, 0, cursor)
