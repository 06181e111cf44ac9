"""out = x W^T + bias in float32, with W packed once for streaming; for one row as for thousands.

    packed [panels, in_features, 48]     packed[p, k, c] = W[48 p + c, k], zeros past the last row of W

A panel is what a thread takes at a time: 8 rows of x by its 48 columns are 24 accumulators in registers, and while
they are summed the next panel is on its way from memory. A weight whose numbers all fit bfloat16, as those of most
checkpoints do, is kept as bfloat16: half the bytes to read, the same products bit for bit.

Every sum starts with the bias and runs over `in_features` in order, one fused multiply-add after the other. So a row's
result depends neither on the other rows nor on the number of threads: bit for bit.

One Zen 5 core, weights out of memory, us of CPU time; oneDNN: `mkldnn._linear_pointwise` with its own packing:

    weight, rows            1      2     32     64    128    512
    3072 x 576, oneDNN    221    225    650   1064   1973   7689
    float32               198    198    459    886   1774   7496
    bfloat16              112    101    487    949   1873   7533
    576 x 1536, oneDNN    116    124    344    555   1001   3878
    float32               101    106    234    453    884   3560
    bfloat16               43     48    237    486    947   3684

512 rows of float32 are 242 GFLOP/s of 262 that the core's two multipliers of 16 numbers can do at 4.1 GHz.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.numbers import FLOAT32, element_of, lines
from kernels.cpu.registers import LANES, STREAMED_ROWS, STREAMED_VECTORS, stream_add
from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared

PANEL = STREAMED_VECTORS * LANES
# Rows of x and depth of a panel that are multiplied before the next ones: both stay in a second cache level of 1 MiB.
_ROWS_BYTES = 512 << 10
_DEPTH = 2048


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out_features, in_features], float32 or bfloat16, as [panels, in_features, 48]; its type: see above."""
    # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
    if weight.dtype == torch.float32 and _fits_bfloat16(weight[:1]) and _fits_bfloat16(weight):
        weight = weight.to(torch.bfloat16)
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed = torch.zeros(num_panels, in_features, PANEL, dtype=weight.dtype)
    whole = out_features // PANEL
    packed[:whole] = weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if whole < num_panels:
        packed[whole, :, : out_features - whole * PANEL] = weight[whole * PANEL :].t()
    return packed


def _fits_bfloat16(weight: torch.Tensor) -> bool:
    return not (weight.view(torch.int32) & 0xFFFF).any()


def matmul(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias [out_features]; all float32 but `packed`, see `pack`.

    out and x may be strided in their first dimension. Raises ValueError for shapes that do not fit.
    """
    (count, size), depth = out.shape, x.shape[1]
    if x.shape[0] != count or packed.shape != (-(-size // PANEL), depth, PANEL):
        raise ValueError(f"out {tuple(out.shape)}, x {tuple(x.shape)} and packed {tuple(packed.shape)} do not fit")
    if bias is not None and bias.shape != (size,):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit out {tuple(out.shape)}")
    if element_of(out, x, *([] if bias is None else [bias])) is not FLOAT32:
        raise TypeError(f"products are computed in float32, not {x.dtype}")
    _matmul(
        element_of(packed),
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
):
    """One item of `items_of`, in all of which no number of `out` is computed twice; see `shared_work.share`."""
    num_panels = (size + PANEL - 1) // PANEL
    out = lines(out_address, FLOAT32, 1, count * out_stride)[0]
    x = lines(x_address, FLOAT32, 1, count * x_stride)[0]
    packed = lines(packed_address, element, 1, num_panels * depth * PANEL)[0]
    bias = lines(bias_address, FLOAT32, 1, size)[0]
    rows_at_once = _rows_at_once(depth)
    row, panel = item // num_panels * rows_at_once, item % num_panels
    rows = min(rows_at_once, count - row)
    column = panel * PANEL
    width = min(PANEL, size - column)
    sums, place, stride = out, row * out_stride + column, out_stride
    if width < PANEL:  # sums of a panel that is wider than what is left of out
        sums, place, stride = np.empty(rows * PANEL, dtype=np.float32), 0, PANEL
    for r in range(rows):
        start = sums[place + r * stride : place + r * stride + PANEL]
        start[:] = np.float32(0.0)
        if bias_address != 0:
            start[:width] = bias[column : column + width]
    ahead = depth * PANEL if panel + 1 < num_panels and item + 1 < end else 0
    for k in range(0, depth, _DEPTH):
        stream_add(
            rows,
            x,
            row * x_stride + k,
            x_stride,
            packed,
            (panel * depth + k) * PANEL,
            sums,
            place,
            stride,
            min(_DEPTH, depth - k),
            ahead,
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
    lanes = min(num_threads, num_items)
    counts = counters(lanes, 1)
    for lane in prange(lanes):
        product = element, out_address, out_stride, x_address, x_stride, packed_address, bias_address
        multiply_panels((counts, lane, lanes), 0, num_items, (*product, count, size, depth))
