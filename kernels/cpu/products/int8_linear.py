"""Dense layers with weights of eight bits on a CPU: formula and arguments as in `reference.int8_linear`.

Sources: Dettmers et al. 2022 (arXiv:2208.07339) for a scale an output channel and one a row of activations; Yao et al.
2022 (arXiv:2206.01861) for finer ones within a row. Packed weights: `kernels.int8_weight`.

First rows are quantised, group by group of 32 inputs (`int8_rows`). Then a thread takes three panels of weights at a
time, and multiplies all rows by them:

    3 panels of weights -> first cache level       27 KiB for 576 inputs; what comes next is prefetched meanwhile
      4 rows at a time  -> registers               `int8_tile`, from the first group to the number that is written

Fewer than 8 rows go through the weights panel by panel, one stream of memory a thread.

A row's result depends on that row alone, bit for bit: sums within a group are exact, and groups are added in order,
whatever the number of rows and threads.

One Zen 5 core, weights out of memory, us of CPU time without quantising, and 10^9 operations a second:

    rows              1            8            32           256
    3072 x 576     44  80       47 606      154 737     1087 833
    576 x 1536     18  99       27 516       73 774      536 845

Quantising 32 rows of 576 inputs takes 3 us, 256 of 1,536 35.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.products.int8_rows import bytes_of_groups, items_of_rows, quantize_rows, rows_in, workspace_bytes
from kernels.cpu.products.int8_tile import TILE_PANELS, TILE_ROWS, multiply_tile
from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared, wait
from kernels.cpu.vectors.dot_products import DOT_KINDS, dot_kind_of_this_cpu
from kernels.cpu.vectors.numbers import FLOAT32, address_of, element_of, lines
from kernels.cpu.vectors.vector_code import CACHE_LINE_BYTES
from kernels.int8_weight import GROUP, PANEL

ROWS_OF_WIDE_TILES = 8
OUTPUTS_OF_ITEM = TILE_PANELS * PANEL
_QUANTIZING, _MULTIPLYING = np.arange(2)  # phases
DOT_KIND = DOT_KINDS[dot_kind_of_this_cpu()]


def int8_linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """See `kernels.oracles.reference.int8_linear`. out and x are float32 or bfloat16 and may be strided in their first
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
    """`int8_linear` by one of `dot_products.DOT_KINDS`."""
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
    element_bytes = lines(x_address, element, 1, 1).itemsize
    workspace = np.empty(workspace_bytes(num_rows, num_in), dtype=np.uint8)
    no_bias = np.zeros(OUTPUTS_OF_ITEM, dtype=np.float32)
    quantizing, multiplying = items_of_rows(num_rows), items_of_outputs(num_out)
    threads = min(num_threads, multiplying)
    counts = counters(threads, 2)
    for thread in prange(threads):
        # Signed, as where a whole stack of layers calls these: what is compiled for that serves here.
        team, rows = (counts, np.int64(thread), threads), rows_in(address_of(workspace), num_rows, num_in)
        quantize_rows(
            team, _QUANTIZING, quantizing, (element, x_address, np.int64(x_stride * element_bytes), num_in, rows)
        )
        wait(team, _QUANTIZING, quantizing)
        weight = weight_address, scale_address, bias_address, address_of(no_bias), num_out
        row_bytes = np.int64(out_stride * element_bytes)
        multiply_panels(team, _MULTIPLYING, multiplying, (element, kind, out_address, row_bytes, rows, weight))


@njit(nogil=True)
def items_of_outputs(num_out):  # type: ignore[no-untyped-def]
    """How many items a product has, of 3 panels each."""
    return (num_out + OUTPUTS_OF_ITEM - 1) // OUTPUTS_OF_ITEM


@njit(nogil=True)
def multiply_some(item, end, element, kind, out, out_row, rows, weight):  # type: ignore[no-untyped-def]
    """One item of `items_of_outputs`: all rows (see `int8_rows.rows_in`) by its outputs; see `shared_work.shared`.

    out: address, `out_row` bytes a row. weight: addresses of packed numbers, scales, bias (or 0) and of as many zeros
    as an item has outputs; the number of all outputs.
    """
    packed, scales, bias, zeros, num_out = weight
    num_panels, panel_bytes = (num_out + PANEL - 1) // PANEL, rows[4] * GROUP * PANEL
    output_bytes = lines(out, element, 1, 1).itemsize
    panel, last_panel = item * TILE_PANELS, min((item + 1) * TILE_PANELS, num_panels)
    soon = min(end * TILE_PANELS, num_panels)
    width = TILE_PANELS if rows[3] >= ROWS_OF_WIDE_TILES and panel + TILE_PANELS == last_panel else 1
    while panel < last_panel:
        first = panel * PANEL
        next_lines = min(width, soon - panel - width) * panel_bytes // CACHE_LINE_BYTES
        panels = packed + panel * panel_bytes, panel_bytes, width, next_lines
        factors, added = scales + first * 4, bias + first * 4 if bias != 0 else zeros
        if first + width * PANEL <= num_out:
            _multiply_rows(element, kind, out + first * output_bytes, out_row, rows, panels, factors, added)
        else:
            count = num_out - first
            _multiply_edge(element, kind, out + first * output_bytes, out_row, rows, panels, factors, added, count)
        panel += width


multiply_panels = shared(multiply_some)


@njit(nogil=True)
def _multiply_rows(element, kind, out, out_row, rows, panels, factors, added):  # type: ignore[no-untyped-def]
    """All rows by 1 or 3 panels: their address, bytes of one, how many; how many cache lines will be read next."""
    q, scales, sums, num_rows, num_groups = rows
    weight, panel_bytes, width, next_lines = panels
    q_row, group_row = num_groups * GROUP, bytes_of_groups(num_groups)
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    # What comes next is prefetched by whole tiles meanwhile, so many lines a group.
    num_whole = max(num_rows // TILE_ROWS, 1)
    lines_a_group = (next_lines + num_whole * num_groups - 1) // (num_whole * num_groups)
    lines_a_tile = lines_a_group * num_groups
    for tile in range(num_tiles):
        row = tile * TILE_ROWS
        places = (
            q + row * q_row,
            q_row,
            scales + row * group_row,
            sums + row * group_row,
            group_row,
            weight,
            panel_bytes,
            factors,
            added,
            out + row * out_row,
            out_row,
            num_groups,
            weight + width * panel_bytes + tile * lines_a_tile * CACHE_LINE_BYTES,
            lines_a_group if tile * lines_a_tile < next_lines else 0,
        )
        multiply_tile(kind, element, min(TILE_ROWS, num_rows - row), width, places)


@njit(nogil=True)
def _multiply_edge(element, kind, out, out_row, rows, panels, factors, added, count):  # type: ignore[no-untyped-def]
    """The same where only `count` of the panels' outputs exist: nothing past them is read or written."""
    num_rows, size = rows[3], panels[2] * PANEL
    whole, numbers = np.empty((num_rows, size), lines(out, element, 1, 1).dtype), np.zeros((2, size), np.float32)
    numbers[0, :count] = lines(factors, FLOAT32, 1, count)[0]
    numbers[1, :count] = lines(added, FLOAT32, 1, count)[0]
    _multiply_into(element, kind, whole, rows, panels, numbers)
    for row in range(num_rows):
        lines(out + row * out_row, element, 1, count)[0][:] = whole[row, :count]


@njit(nogil=True)
def _multiply_into(element, kind, whole, rows, panels, numbers):  # type: ignore[no-untyped-def]
    """A function of its own, as an array lives as long as a call that it was given to: not so one's address."""
    out_row, factors, added = whole.shape[1] * whole.itemsize, address_of(numbers[0]), address_of(numbers[1])
    _multiply_rows(element, kind, address_of(whole), out_row, rows, panels, factors, added)
