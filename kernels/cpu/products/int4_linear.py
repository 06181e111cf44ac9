"""Dense layers with weights of four bits on a CPU, and rows of eight, quantised as they come.

    out[t, o] = bias[o] + sum_g step[t, g] * sum_{i in g} p[t, i] (d[o, g] w[o, i] + m[o, g])

p and step as in `reference.int8_linear`; group g is the inputs 32 g to 32 g + 31. A float32 weight that was
quantised once to four bits (`few_bits`) is scales d, integers w and minima m, and stays what it is: only rows are
rounded, where `int8_linear` rounds weights, too.

First rows are quantised (`int8_rows`). Then a thread takes a panel of 48 outputs at a time and multiplies all rows by
it, 4 at a time in registers (`int4_tile`). A row's result depends on that row alone, bit for bit: sums within a group
are exact, and groups are added in order, whatever the number of rows and threads.

One Zen 5 core, weights out of memory, us of CPU time with quantising, beside a weight of eight bits:

    rows                      1      8     32    256
    3072 x 576, 4 bits       39     58    194   1477
                8 bits       57     72    167   1174
    576 x 1536, 4 bits       22     34    107    762
                8 bits       29     43     95    570

So few rows gain what need not be read, and many lose what a scale and a minimum of each group take: eleven turns of
the multipliers for a group, where eight bits take nine. Writing the integers out as bytes first would give 2 % back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.products.few_bits import FORMATS
from kernels.cpu.products.int4_tile import TILE_ROWS, multiply_tile
from kernels.cpu.products.int8_linear import DOT_KIND
from kernels.cpu.products.int8_rows import bytes_of_groups, items_of_rows, quantize_rows, rows_in, workspace_bytes
from kernels.cpu.products.packed_weight import packed_shape
from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared, wait
from kernels.cpu.vectors.cache_prefetch import NONE, next_run
from kernels.cpu.vectors.float_tile import PANEL
from kernels.cpu.vectors.numbers import FLOAT32, address_of, element_of, lines
from kernels.cpu.vectors.vector_code import CACHE_LINE_BYTES
from kernels.int8_weight import GROUP, ZERO

_SYMMETRIC, _WITH_MINIMUM = FORMATS[torch.int32], FORMATS[torch.uint8]
_SYMMETRIC_BYTES, _WITH_MINIMUM_BYTES = _SYMMETRIC.record_bytes, _WITH_MINIMUM.record_bytes
# By these a record's minima become minima over -128, which is what a row's sums are multiplied with; or its scales do,
# as all integers are `least` more than they are stored.
_OF_MINIMA, _OF_SCALES = np.float32(-1 / ZERO), np.float32(-_SYMMETRIC.least / ZERO)
_QUANTIZING, _MULTIPLYING = np.arange(2)  # phases
_LINES_A_GROUP = 16  # the most that a tile prefetches on behalf of a cursor


def int4_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out [T, out_features] = x [T, in_features] W^T + bias, with `weight` as `few_bits` packs four bits.

    All else is float32; out and x may be strided in their first dimension. Raises ValueError for what does not fit.
    """
    multiply(DOT_KIND, out, x, weight, bias)


def multiply(
    dot_kind: Any, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """`int4_linear` by one of `dot_products.DOT_KINDS`."""
    (num_rows, num_in), num_out = x.shape, out.shape[1]
    check_weight(weight, bias, num_out, num_in)
    if out.shape[0] != num_rows or out.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"out {tuple(out.shape)} does not fit x {tuple(x.shape)}, line by line")
    if element_of(out, x) is not FLOAT32:
        raise TypeError(f"products with weights of 4 bits are computed in float32, not {x.dtype}")
    if num_rows == 0:
        return
    _int4_linear(
        dot_kind,
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        num_rows,
        num_in,
        num_out,
        weight.data_ptr(),
        FORMATS[weight.dtype].has_minimum,
        0 if bias is None else bias.data_ptr(),
        num_threads(),
    )


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None, num_out: int, num_in: int) -> None:
    """Raises ValueError for what is not a weight of four bits of this size and its bias."""
    if not is_weight(weight, num_out, num_in):
        raise ValueError(f"weight {tuple(weight.shape)} of {weight.dtype} is not of 4 bits for {num_out} x {num_in}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_out,) or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} of {bias.dtype} is not float32 for {num_out} outputs")


def is_weight(weight: torch.Tensor, num_out: int, num_in: int) -> bool:
    """Whether it is packed as four bits a number for so many outputs and inputs."""
    few = FORMATS.get(weight.dtype)
    has_size = weight.shape == packed_shape(weight.dtype, num_out, num_in)
    return few is not None and few.bits == 4 and has_size and weight.is_contiguous()


@njit(nogil=True, parallel=True, cache=True)
def _int4_linear(  # type: ignore[no-untyped-def]
    kind,
    out_address,
    out_stride,
    x_address,
    x_stride,
    num_rows,
    num_in,
    num_out,
    weight_address,
    has_minimum,
    bias_address,
    num_threads,
):
    workspace = np.empty(workspace_bytes(num_rows, num_in), dtype=np.uint8)
    no_bias = np.zeros(PANEL, dtype=np.float32)
    quantizing, multiplying = items_of_rows(num_rows), items_of_panels(num_out)
    threads = min(num_threads, multiplying)
    counts = counters(threads, 2)
    for thread in prange(threads):
        # Signed, as where a whole stack of layers calls these: what is compiled for that serves here.
        team, rows = (counts, np.int64(thread), threads), rows_in(address_of(workspace), num_rows, num_in)
        quantize_rows(team, _QUANTIZING, quantizing, (FLOAT32, x_address, np.int64(x_stride * 4), num_in, rows))
        wait(team, _QUANTIZING, quantizing)
        weight = weight_address, has_minimum, bias_address, address_of(no_bias), num_out
        places = kind, out_address, np.int64(out_stride * 4), rows, weight, NONE
        multiply_panels(team, _MULTIPLYING, multiplying, places)


@njit(nogil=True)
def items_of_panels(num_out):  # type: ignore[no-untyped-def]
    """How many items a product has: a panel each."""
    return (num_out + PANEL - 1) // PANEL


@njit(nogil=True)
def num_prefetching_inputs(rows, num_weights):  # type: ignore[no-untyped-def]
    """See `streamed_panels.num_prefetching_inputs`; a group of four-bit weights prefetches several lines."""
    return max(rows // TILE_ROWS - 1, 0) * num_weights // (PANEL * GROUP) * _LINES_A_GROUP


@njit(nogil=True)
def multiply_panel(item, end, kind, out, out_row, rows, weight, cursor):  # type: ignore[no-untyped-def]
    """One item of `items_of_panels`: all rows (see `int8_rows.rows_in`) by its outputs; see `shared_work.shared`.

    out: address, `out_row` bytes a row. weight: the address of the records, whether they have minima; addresses of
    the bias (or 0) and of as many zeros as a panel has outputs; the number of all outputs. `cursor`, of
    `cache_prefetch` or NONE: what whole tiles but the first prefetch meanwhile.
    """
    packed, has_minimum, bias, zeros, num_out = weight
    first, panel_bytes = item * PANEL, rows[4] * _record_bytes(has_minimum)
    panel = packed + item * panel_bytes, has_minimum, panel_bytes // CACHE_LINE_BYTES if item + 1 < end else 0
    place, added = out + first * 4, bias + first * 4 if bias != 0 else zeros
    if first + PANEL <= num_out:
        _multiply_rows(kind, place, out_row, rows, panel, added, cursor)
    else:
        _multiply_edge(kind, place, out_row, rows, panel, added, num_out - first, cursor)


multiply_panels = shared(multiply_panel)


@njit(nogil=True)
def _record_bytes(has_minimum):  # type: ignore[no-untyped-def]
    return _WITH_MINIMUM_BYTES if has_minimum else _SYMMETRIC_BYTES


@njit(nogil=True)
def _multiply_rows(kind, out, out_row, rows, panel, added, cursor):  # type: ignore[no-untyped-def]
    """All rows by a panel: its address, whether it has minima, how many cache lines will be read next."""
    q, steps, sums, num_rows, num_groups = rows
    weight, has_minimum, next_lines = panel
    record_bytes = _record_bytes(has_minimum)
    minima, minimum_factor = (PANEL * 2, _OF_MINIMA) if has_minimum else (0, _OF_SCALES)
    q_row, group_row = num_groups * GROUP, bytes_of_groups(num_groups)
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    # What comes next is prefetched by whole tiles meanwhile, so many lines a group.
    num_whole = max(num_rows // TILE_ROWS, 1)
    lines_a_group = (next_lines + num_whole * num_groups - 1) // (num_whole * num_groups)
    lines_a_tile = lines_a_group * num_groups
    for tile in range(num_tiles):
        row = tile * TILE_ROWS
        other, count = np.int64(0), np.int64(0)
        if cursor != NONE and tile > 0 and row + TILE_ROWS <= num_rows:
            other, count = next_run(cursor, num_groups * _LINES_A_GROUP)
        places = (
            q + row * q_row,
            q_row,
            steps + row * group_row,
            sums + row * group_row,
            group_row,
            weight,
            record_bytes,
            minima,
            minimum_factor,
            added,
            out + row * out_row,
            out_row,
            num_groups,
            weight + num_groups * record_bytes + tile * lines_a_tile * CACHE_LINE_BYTES,
            lines_a_group if tile * lines_a_tile < next_lines else 0,
            other,
            (count + num_groups - 1) // num_groups,
        )
        multiply_tile(kind, min(TILE_ROWS, num_rows - row), places)


@njit(nogil=True)
def _multiply_edge(kind, out, out_row, rows, panel, added, count, cursor):  # type: ignore[no-untyped-def]
    """The same where only `count` of the panel's outputs exist: nothing past them is read or written."""
    num_rows = rows[3]
    whole, bias = np.empty((num_rows, PANEL), np.float32), np.zeros(PANEL, np.float32)
    bias[:count] = lines(added, FLOAT32, 1, count)[0]
    _multiply_into(kind, whole, rows, panel, bias, cursor)
    for row in range(num_rows):
        lines(out + row * out_row, FLOAT32, 1, count)[0][:] = whole[row, :count]


@njit(nogil=True)
def _multiply_into(kind, whole, rows, panel, bias, cursor):  # type: ignore[no-untyped-def]
    """A function of its own, as an array lives as long as a call that it was given to: not so one's address."""
    _multiply_rows(kind, address_of(whole), PANEL * 4, rows, panel, address_of(bias), cursor)
