"""What a thread does with one panel of a packed weight, whichever way that is kept; the same bits from each.

sums[r, c] += sum_k x[r, k] W[48 panel + c, k]        k in order, one fused multiply-add after the other
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import extending

from kernels.cpu.few_bits import GROUP
from kernels.cpu.few_bits_tile import FORMAT_OF, MOST_ROWS, multiply_add, multiply_add_and_write, record_bytes
from kernels.cpu.numbers import FLOAT32, lines
from kernels.cpu.registers import CACHE_LINE_BYTES, LANES, PANEL, STREAMED_ROWS, stream_add

_DEPTH = 2048  # of a panel that is multiplied by all rows before the next: it stays in a second cache level of 1 MiB
_EXPANDED_DEPTH = 128  # of a panel that is written out as float32 at a time: 24 KiB, in the first cache level


def add_panels(  # type: ignore[no-untyped-def]
    element: Any, rows, panels, x, x_stride, packed, panel, has_next, sums, sums_stride, depth
) -> None:
    """Adds `panels` panels from `panel` on (2 only of one row) to sums [rows, 48 panels]; for compiled code alone.

    element: how the weight is kept (`element_of_packed`); x, packed, sums: addresses, strides in numbers. `has_next`:
    the thread goes on with the panels that come next, which are asked for meanwhile.
    """
    raise NotImplementedError


@extending.overload(add_panels, jit_options={"nogil": True})
def _add_panels(  # type: ignore[no-untyped-def]
    element: Any, rows, panels, x, x_stride, packed, panel, has_next, sums, sums_stride, depth
) -> Any:
    return _add_few_bits if element in FORMAT_OF else _add_floats


def _add_floats(  # type: ignore[no-untyped-def]
    element: Any, rows, panels, x, x_stride, packed, panel, has_next, sums, sums_stride, depth
) -> None:
    factors, totals = lines(x, FLOAT32, 1, rows * x_stride)[0], lines(sums, FLOAT32, 1, rows * sums_stride)[0]
    weight = lines(packed, element, 1, (panel + panels) * depth * PANEL)[0]
    for p in range(panels):
        ahead = depth * PANEL if has_next or p + 1 < panels else 0
        for k in range(0, depth, _DEPTH):
            stream_add(
                rows,
                factors,
                k,
                x_stride,
                weight,
                ((panel + p) * depth + k) * PANEL,
                totals,
                p * PANEL,
                sums_stride,
                min(_DEPTH, depth - k),
                ahead,
            )


def _add_few_bits(  # type: ignore[no-untyped-def]
    element: Any, rows, panels, x, x_stride, packed, panel, has_next, sums, sums_stride, depth
) -> None:
    record = record_bytes(element)
    panel_bytes = depth // GROUP * record
    weight = packed + panel * panel_bytes
    ahead = panels * panel_bytes if has_next else 0
    if rows <= MOST_ROWS:
        multiply_add(
            element, rows, panels, x, x_stride * 4, weight, panel_bytes, sums, sums_stride * 4, depth // GROUP, ahead
        )
        return
    factors, totals = lines(x, FLOAT32, 1, rows * x_stride)[0], lines(sums, FLOAT32, 1, rows * sums_stride)[0]
    first = STREAMED_ROWS
    size = min(_EXPANDED_DEPTH, depth) * PANEL
    memory = np.empty(size + LANES, dtype=np.float32)
    start = -memory.ctypes.data % CACHE_LINE_BYTES // 4  # a vector that lies in two lines takes twice as long
    scratch = memory[start : start + size]
    for k in range(0, depth, _EXPANDED_DEPTH):
        piece = min(_EXPANDED_DEPTH, depth - k)
        numbers, groups = weight + k // GROUP * record, piece // GROUP
        multiply_add_and_write(
            element, x + k * 4, x_stride * 4, numbers, 0, sums, sums_stride * 4, groups, ahead, scratch.ctypes.data
        )
        stream_add(
            rows - first,
            factors,
            first * x_stride + k,
            x_stride,
            scratch,
            0,
            totals,
            first * sums_stride,
            sums_stride,
            piece,
            0,
        )
