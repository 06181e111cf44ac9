"""out = x W^T + bias in float32, with W packed once for streaming (`packed_weight`); for one row as for thousands.

A panel is what a thread multiplies at a time: 8 rows of x by its 48 columns are 24 accumulators in registers, and while
they are summed the next panel is on its way from memory. A weight kept in few bits becomes float32 in registers, where
up to 8 rows are multiplied by it at once; of more rows these leave a piece of a panel in the cache for the others.

Every sum starts with the bias and runs over `in_features` in order, one fused multiply-add after the other. So a row's
result depends neither on the other rows nor on the number of threads nor on how the weight is kept: bit for bit.

One Zen 5 core, weights out of memory, us of CPU time, the better of two medians; oneDNN: `mkldnn._linear_pointwise`
with its own packing:

    weight, rows                1      2      8     32     64    128    512
    3072 x 576, oneDNN        276    203    299    669   1157   2144   8225
    float32                   198    189    210    540   1035   2029   8198
    bfloat16                  102    107    140    522   1023   2069   8329
    8 bits                     52     57    148    545   1049   2050   8310
    4 bits and a minimum       49     56    149    570   1074   2093   8417
    4 bits                     48     56    151    548   1050   2034   8401
    576 x 1536, oneDNN        124    109    150    346    591   1087   4152
    float32                    82     83     94    279    537   1032   4070
    bfloat16                   46     49     74    263    511   1025   4073
    8 bits                     29     31     77    284    525   1035   4094
    4 bits and a minimum       27     30     76    281    524   1044   4128
    4 bits                     27     31     77    273    524   1036   4132

Two cores that wait for the same memory gain more: 3072 x 576 by one row takes 153 us in float32, 26 in 4 bits, by 32
rows 306 and 277.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.products.packed_weight import element_of_packed, packed_shape
from kernels.cpu.products.panel_products import add_panel
from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared
from kernels.cpu.vectors.cache_prefetch import NONE
from kernels.cpu.vectors.float_tile import PANEL, STREAMED_ROWS
from kernels.cpu.vectors.numbers import FLOAT32, address_of, element_of, lines

_ROWS_BYTES = 512 << 10  # of x that are multiplied before the next rows: they stay in a second cache level of 1 MiB
_ZEROS = np.zeros(PANEL, dtype=np.float32)  # where sums start without a bias


def matmul(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias [out_features]; all float32 but `packed`, of `pack`.

    out and x may be strided in their first dimension. Of a weight of `pack_pairs` x is [T, in_features / 2], rows of
    bfloat16 seen as float32. Raises ValueError for shapes that do not fit.
    """
    (count, size), depth = out.shape, x.shape[1]
    if x.shape[0] != count or packed.shape != packed_shape(packed.dtype, size, depth):
        raise ValueError(f"out {tuple(out.shape)}, x {tuple(x.shape)} and packed {tuple(packed.shape)} do not fit")
    if bias is not None and bias.shape != (size,):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit out {tuple(out.shape)}")
    if element_of(out, x, *([] if bias is None else [bias])) is not FLOAT32:
        raise TypeError(f"products are computed in float32, not {x.dtype}")
    _matmul(
        element_of_packed(packed),
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        count,
        size,
        depth,
        num_threads(),
    )


@njit(nogil=True)
def _rows_at_once(depth):  # type: ignore[no-untyped-def]
    return max(_ROWS_BYTES // (4 * depth), 1) // STREAMED_ROWS * STREAMED_ROWS + STREAMED_ROWS


@njit(nogil=True)
def items_of(count, size, depth):  # type: ignore[no-untyped-def]
    """How many items a product has: a panel and some rows each, all panels with the first rows before the next rows."""
    rows_at_once = _rows_at_once(depth)
    return (count + rows_at_once - 1) // rows_at_once * ((size + PANEL - 1) // PANEL)


@njit(nogil=True)
def multiply_panel(  # type: ignore[no-untyped-def]
    item,
    end,
    element,
    out_address,
    out_stride,
    x_address,
    x_stride,
    packed_address,
    bias_address,
    count,
    size,
    depth,
    cursor,
):
    """One item of `items_of`, in all of which no number of `out` is computed twice; see `shared_work.share`.

    `cursor`: see `panel_products.add_panel`, or NONE.
    """
    num_panels = (size + PANEL - 1) // PANEL
    out = lines(out_address, FLOAT32, 1, count * out_stride)[0]
    rows_at_once = _rows_at_once(depth)
    row, panel = item // num_panels * rows_at_once, item % num_panels
    rows, column = min(rows_at_once, count - row), panel * PANEL
    width = min(PANEL, size - column)
    sums, place, stride = out, row * out_stride + column, out_stride
    start = address_of(_ZEROS) if bias_address == 0 else bias_address + column * 4
    if width < PANEL:  # sums of a panel that is wider than what is left of out, and then what they start from
        sums, place, stride = np.empty((rows + 1) * PANEL, dtype=np.float32), 0, PANEL
        line = sums[rows * PANEL :]
        line[:] = np.float32(0.0)
        if bias_address != 0:
            line[:width] = lines(start, FLOAT32, 1, width)[0]
        start = address_of(line)
    add_panel(
        element,
        rows,
        x_address + row * x_stride * 4,
        x_stride,
        packed_address,
        panel,
        panel + 1 < num_panels and item + 1 < end,
        start,
        address_of(sums) + place * 4,
        stride,
        depth,
        cursor,
    )
    if width < PANEL:
        for r in range(rows):
            place = (row + r) * out_stride + column
            out[place : place + width] = sums[r * PANEL : r * PANEL + width]


multiply_panels = shared(multiply_panel)


@njit(nogil=True, parallel=True, cache=True)
def _matmul(  # type: ignore[no-untyped-def]
    element: Any,
    out_address,
    out_stride,
    x_address,
    x_stride,
    packed_address,
    bias_address,
    count,
    size,
    depth,
    num_threads,
):
    num_items = items_of(count, size, depth)
    threads = min(num_threads, num_items)
    counts = counters(threads, 1)
    for thread in prange(threads):
        product = element, out_address, out_stride, x_address, x_stride, packed_address, bias_address
        multiply_panels(
            (counts, np.int64(thread), threads), np.int64(0), num_items, (*product, count, size, depth, NONE)
        )
