"""Dense layers with weights of eight bits on a CPU: formula and arguments as in `kernels.reference.int8_linear`.

Sources: Dettmers et al. 2022 (arXiv:2208.07339) for a scale an output channel and one a row of activations; Yao et al.
2022 (arXiv:2206.01861) for finer ones within a row. Packed weights: `kernels.int8_weight`.

First every row is quantised, group by group of 32 inputs. Then each thread takes its share of the outputs:

    3 panels of weights -> first cache level       for 1,024 inputs at a time
      4 rows at a time  -> registers               `int8_tile`; the next weights are asked for between two tiles
    totals [128 rows, 48 outputs]                  * scale of the output + bias -> out

Fewer than 8 rows go through the weights panel by panel, one stream of memory a thread.

A row's result depends on that row alone, bit for bit: sums within a group are exact, and groups are added in order,
whatever the number of rows and threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.int8_rows import quantize_row
from kernels.cpu.int8_tile import (
    DOT_KINDS,
    TILE_PANELS,
    TILE_ROWS,
    ask_for,
    dot_kind_of_this_cpu,
    finish_panel,
    multiply_add,
)
from kernels.cpu.numbers import FLOAT32, element_of, from_float32, lines
from kernels.cpu.registers import CACHE_LINE_BYTES
from kernels.cpu.runtime import num_threads
from kernels.int8_weight import GROUP, PANEL

ROW_CHUNK = 128
ROWS_OF_WIDE_TILES = 8
GROUP_CHUNK = 32  # with 3 panels, 48 KiB of weights
ROWS_QUANTIZED_ALONE = 4  # waking the threads takes longer than fewer rows

DOT_KIND = DOT_KINDS[dot_kind_of_this_cpu()]


def int8_linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `kernels.reference.int8_linear`. out and x are float32 or bfloat16 and may be strided in their first
    dimension; weight, scale and bias are contiguous, the last two float32.
    """
    multiply(DOT_KIND, out, x, weight, scale, bias)


def multiply(
    dot_kind: Any,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """`int8_linear` by one of `int8_tile.DOT_KINDS`."""
    (num_rows, num_in), num_out = x.shape, scale.shape[0]
    check_weight(weight, scale, bias, num_out, num_in)
    if out.shape != (num_rows, num_out) or out.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"out {tuple(out.shape)} or x {tuple(x.shape)} does not fit {num_out} outputs, line by line")
    if num_rows == 0:
        return
    _int8_linear(
        element_of(out, x),
        dot_kind,
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        num_rows,
        num_in,
        num_out,
        weight.data_ptr(),
        scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        num_threads(),
    )


def check_weight(
    weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, num_out: int, num_in: int
) -> None:
    """Raises ValueError for what is not a packed weight of this size, its scale and its bias."""
    expected = (-(-num_out // PANEL), -(-num_in // GROUP))
    if weight.shape[:2] != expected or weight.dtype != torch.uint8 or not weight.is_contiguous():
        raise ValueError(f"weight {tuple(weight.shape)} of {weight.dtype} is not packed for {num_out} x {num_in}")
    for name, values in (("scale", scale), ("bias", bias)):
        if values is None:
            continue
        if values.dtype != torch.float32 or values.shape != (num_out,) or not values.is_contiguous():
            raise ValueError(f"{name} {tuple(values.shape)} of {values.dtype} is not float32 for {num_out} outputs")


@njit(nogil=True)
def _quantize(x, size, q, scales, sums, first, step):  # type: ignore[no-untyped-def]
    """Every `step`-th row of x from `first` on."""
    num_groups = scales.shape[1]
    values = np.zeros(q.shape[1], dtype=np.float32)
    for t in range(first, x.shape[0], step):
        quantize_row(x[t], size, values, q[t].ctypes.data, scales[t].ctypes.data, sums[t].ctypes.data, num_groups)


@njit(nogil=True, parallel=True, cache=True)
def _int8_linear(  # type: ignore[no-untyped-def]
    element,
    kind,
    out_address,
    out_stride,
    x_address,
    x_stride,
    num_rows,
    num_in,
    num_out,
    weight_address,
    scale_address,
    bias_address,
    num_threads,
):
    num_groups = (num_in + GROUP - 1) // GROUP
    num_panels = (num_out + PANEL - 1) // PANEL
    padded, panel_bytes = num_groups * GROUP, num_groups * GROUP * PANEL
    out = lines(out_address, element, num_rows, out_stride)
    out_bytes = out_stride * out.itemsize
    x = lines(x_address, element, num_rows, x_stride)
    scale = lines(scale_address, FLOAT32, 1, num_out)[0]
    bias = lines(bias_address, FLOAT32, 1, num_out)[0]

    q = np.empty((num_rows, padded), dtype=np.int8)
    scales = np.empty((num_rows, num_groups), dtype=np.float32)
    sums = np.empty((num_rows, num_groups), dtype=np.int32)
    if num_rows <= ROWS_QUANTIZED_ALONE or num_threads == 1:
        _quantize(x, num_in, q, scales, sums, 0, 1)
    else:
        for lane in prange(num_threads):
            _quantize(x, num_in, q, scales, sums, lane, num_threads)

    width = 1 if num_rows < ROWS_OF_WIDE_TILES else TILE_PANELS
    row_bytes = width * PANEL * 4
    num_items = (num_panels + width - 1) // width
    for lane in prange(num_threads):
        totals = np.empty((min(num_rows, ROW_CHUNK), width * PANEL), dtype=np.float32)
        no_bias = np.zeros(PANEL, dtype=np.float32)
        last_item = num_items * (lane + 1) // num_threads
        for item in range(num_items * lane // num_threads, last_item):
            first_panel = item * width
            panels = min(width, num_panels - first_panel)
            has_next = width > 1 and item + 1 < last_item
            for first_row in range(0, num_rows, ROW_CHUNK):
                rows = min(ROW_CHUNK, num_rows - first_row)
                num_tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
                totals[:rows] = np.float32(0.0)
                for group in range(0, num_groups, GROUP_CHUNK):
                    groups = min(GROUP_CHUNK, num_groups - group)
                    chunk = weight_address + first_panel * panel_bytes + group * GROUP * PANEL
                    # What the next item reads in this place, by a share a tile. Out of memory, 32 rows by 3072 x 576 on
                    # one Zen 5 core take 226 us in place of 261, by 49152 x 576 3.7 ms in place of 4.2.
                    share = groups * GROUP * PANEL // num_tiles + CACHE_LINE_BYTES - 1
                    share -= share % CACHE_LINE_BYTES
                    for tile in range(num_tiles):
                        row = tile * TILE_ROWS
                        if has_next and first_row + rows == num_rows:
                            for panel in range(panels):
                                ask_for(chunk + (width + panel) * panel_bytes + tile * share, share)
                        multiply_add(
                            kind,
                            min(TILE_ROWS, rows - row),
                            panels,
                            q.ctypes.data + (first_row + row) * padded + group * GROUP,
                            padded,
                            scales.ctypes.data + ((first_row + row) * num_groups + group) * 4,
                            sums.ctypes.data + ((first_row + row) * num_groups + group) * 4,
                            num_groups * 4,
                            chunk,
                            panel_bytes,
                            totals.ctypes.data + row * row_bytes,
                            row_bytes,
                            groups,
                        )
                for panel in range(panels):
                    output = (first_panel + panel) * PANEL
                    if output + PANEL <= num_out:
                        finish_panel(
                            element,
                            totals.ctypes.data + panel * PANEL * 4,
                            row_bytes,
                            scale_address + output * 4,
                            bias_address + output * 4 if bias_address != 0 else no_bias.ctypes.data,
                            out_address + first_row * out_bytes + output * out.itemsize,
                            out_bytes,
                            rows,
                        )
                        continue
                    for row in range(rows):
                        place = out[first_row + row]
                        for i in range(num_out - output):
                            added = bias[output + i] if bias_address != 0 else np.float32(0.0)
                            total = totals[row, panel * PANEL + i]
                            place[output + i] = from_float32(total * scale[output + i] + added, place[output + i])
