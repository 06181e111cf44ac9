"""Whether a float32 weight is one of few bits (see `few_bits`), found from its numbers alone, and its packed form.

Of a group of 32 inputs the scale is a distance between numbers over the integers between them: which ones is tried,
what fitted last first, and a guess counts only when every number of the group comes out of it with the same 32 bits,
signs of zeros included. So nothing is lost wherever the numbers came from, and a tensor fits whole or not at all.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.products.few_bits import FORMATS, GROUP, STEP, FewBits
from kernels.cpu.runtime import num_threads
from kernels.cpu.vectors.float_tile import PANEL
from kernels.cpu.vectors.numbers import FLOAT32, INT32, address_of, from_float32, lines, to_float32

_HALF = np.int16(0)  # a float16, see `numbers`
_TO_INTEGER = np.float32(3 << 22)  # plus and minus this a float32 is rounded to the nearest integer, ties to even


def pack_few_bits(weight: torch.Tensor, most_bits: int = 8) -> torch.Tensor | None:
    """`weight` f32[out_features, in_features] as [panels, groups, record] of a format's type; None if none fits."""
    if weight.shape[1] % GROUP or 0 in weight.shape:
        return None
    for dtype, few in FORMATS.items():
        if few.bits > most_bits:
            continue
        # A weight that does not fit shows so in its first row, nearly always: the load need not look at all of it.
        if _packed(weight[:1], dtype, few) is not None and (packed := _packed(weight, dtype, few)) is not None:
            return packed
    return None


def _packed(weight: torch.Tensor, dtype: torch.dtype, few: FewBits) -> torch.Tensor | None:
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed = torch.empty(num_panels, in_features // GROUP, few.record_bytes // dtype.itemsize, dtype=dtype)
    fits = _pack(
        packed.data_ptr(),
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        out_features,
        in_features,
        few.bits,
        few.least,
        few.most,
        few.has_minimum,
        num_threads(),
    )
    return packed if fits else None


@njit(nogil=True, parallel=True, cache=True)
def _pack(  # type: ignore[no-untyped-def]
    packed_address,
    weight_address,
    row_stride,
    column_stride,
    out_features,
    in_features,
    bits,
    least,
    most,
    has_minimum,
    num_threads,
):
    num_panels = (out_features + PANEL - 1) // PANEL
    threads = min(num_threads, num_panels)
    fits, scratch = np.empty(threads, dtype=np.bool_), np.empty((threads, 3 * GROUP), dtype=np.int32)
    for thread in prange(threads):
        fits[thread] = _pack_panels(
            scratch[thread],
            packed_address,
            weight_address,
            row_stride,
            column_stride,
            out_features,
            in_features,
            num_panels * thread // threads,
            num_panels * (thread + 1) // threads,
            bits,
            least,
            most,
            has_minimum,
        )
    return fits.all()


@njit(nogil=True)
def _pack_panels(  # type: ignore[no-untyped-def]
    scratch,
    packed_address,
    weight_address,
    row_stride,
    column_stride,
    out_features,
    in_features,
    first_panel,
    end_panel,
    bits,
    least,
    most,
    has_minimum,
):
    """Fills these panels; False where one does not fit, and those behind it are not looked at. scratch: i32[96]."""
    weight = lines(weight_address, FLOAT32, 1, (out_features - 1) * row_stride + (in_features - 1) * column_stride + 1)
    num_groups = in_features // GROUP
    record_bytes = PANEL * (4 if has_minimum else 2) + PANEL * GROUP * bits // 8
    panel_bytes = num_groups * record_bytes
    packed = lines(packed_address, np.int8(0), end_panel, panel_bytes)
    # Lines at an address, as passing arrays on and on counts references to them: 90 of 200 ns a group.
    start, size = address_of(scratch), GROUP * 4
    numbers, number_bits = lines(start, FLOAT32, 1, GROUP)[0], lines(start, INT32, 1, GROUP)[0]
    made, made_bits = lines(start + size, FLOAT32, 1, GROUP)[0], lines(start + size, INT32, 1, GROUP)[0]
    integers = lines(start + 2 * size, INT32, 1, GROUP)[0]
    group = numbers, number_bits, made, made_bits, integers
    guess = np.zeros(2, dtype=np.int64)
    for panel in range(first_panel, end_panel):
        rows = min(PANEL, out_features - panel * PANEL)
        if rows < PANEL:
            packed[panel] = 0
        for row in range(rows):
            for g in range(num_groups):
                place = (panel * PANEL + row) * row_stride + g * GROUP * column_stride
                for k in range(GROUP):
                    numbers[k] = weight[0, place + k * column_stride]
                found, scale, minimum = _fit(group, guess, least, most, has_minimum)
                if not found:
                    return False
                record = packed_address + panel * panel_bytes + g * record_bytes
                _store(record, row, integers, scale, minimum, bits, least, has_minimum)
    return True


@njit(nogil=True)
def _fit(group, guess, least, most, has_minimum):  # type: ignore[no-untyped-def]
    """Whether a group fits, its scale and minimum; fills its integers. `guess` is what fitted last, or zeros."""
    numbers, number_bits = group[0], group[1]
    if not _is_finite(number_bits):
        return False, FLOAT32, FLOAT32
    low, high = _ends(numbers)
    if guess[0] != 0:
        found, scale, minimum = _try(group, low, high, guess[0], guess[1], least, most, has_minimum)
        if found:
            return True, scale, minimum
    # `reach`: integers from the lowest number to the highest, or of the largest magnitude; `first`: of the lowest.
    for reach in range(max(-least, most), 0, -1):
        for first in range(most - reach + 1 if has_minimum else 1):
            found, scale, minimum = _try(group, low, high, reach, first, least, most, has_minimum)
            if found:
                guess[0], guess[1] = reach, first
                return True, scale, minimum
    return False, FLOAT32, FLOAT32


@njit(nogil=True)
def _is_finite(bits):  # type: ignore[no-untyped-def]
    largest = np.int32(0)
    for k in range(GROUP):
        largest = max(largest, bits[k] & np.int32(0x7FFFFFFF))
    return largest < np.int32(0x7F800000)


@njit(nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _ends(numbers):  # type: ignore[no-untyped-def]
    """The lowest and the highest of finite numbers; a zero may have either sign."""
    low, high = numbers[0], numbers[0]
    for k in range(1, GROUP):
        low = numbers[k] if numbers[k] < low else low
        high = numbers[k] if numbers[k] > high else high
    return low, high


@njit(nogil=True)
def _try(group, low, high, reach, first, least, most, has_minimum):  # type: ignore[no-untyped-def]
    """One guess. Ends are off by a rounding of float32 at most, so rounding to float16 finds the scale itself."""
    if has_minimum:
        scale = _rounded((high - low) / np.float32(reach))
        minimum = _rounded(low - scale * np.float32(first))
        return _comes_out(group, scale, minimum, least, most, True), scale, minimum
    extreme = high if high >= -low else low
    for sign in (1, -1):
        integer = reach * sign * (1 if extreme >= FLOAT32 else -1)
        if least <= integer <= most:
            scale = _rounded(extreme / np.float32(integer))
            if _comes_out(group, scale, FLOAT32, least, most, False):
                return True, scale, FLOAT32
    return False, FLOAT32, FLOAT32


@njit(nogil=True)
def _comes_out(group, scale, minimum, least, most, has_minimum):  # type: ignore[no-untyped-def]
    """Whether integers make the very bits of the numbers; fills `integers`."""
    numbers, number_bits, made, made_bits, integers = group
    inverse = np.float32(1.0) / scale if scale != FLOAT32 else FLOAT32
    lowest, highest = np.float32(least), np.float32(most)
    for k in range(GROUP):
        quotient = (numbers[k] - minimum) * inverse
        quotient = quotient if quotient > lowest else lowest
        quotient = quotient if quotient < highest else highest
        integer = (quotient + _TO_INTEGER) - _TO_INTEGER  # never -0, which no integer is in a product
        integers[k] = np.int32(integer)
        # A product is exact. Without a minimum it keeps the sign of its zero.
        made[k] = scale * integer + minimum if has_minimum else scale * integer
    difference = np.int32(0)
    for k in range(GROUP):
        difference |= made_bits[k] ^ number_bits[k]
    return difference == 0


@njit(nogil=True)
def _store(record, row, integers, scale, minimum, bits, least, has_minimum):  # type: ignore[no-untyped-def]
    """A group of an output into its record, which begins at this address."""
    num_halves = 2 * PANEL if has_minimum else PANEL
    halves = lines(record, _HALF, 1, num_halves)[0]
    halves[row] = from_float32(scale, _HALF)
    if has_minimum:
        halves[PANEL + row] = from_float32(minimum, _HALF)
    if bits == 8:
        places = lines(record + num_halves * 2, np.int8(0), GROUP, PANEL)
        for k in range(GROUP):
            places[k, row] = integers[k]
        return
    words = lines(record + num_halves * 2, INT32, GROUP // STEP, PANEL)
    for j in range(GROUP // STEP):
        word = np.int32(0)
        for i in range(STEP):
            word |= np.int32(integers[STEP * j + i] - least) << np.int32(4 * i)
        words[j, row] = word


@njit(nogil=True)
def _rounded(number):  # type: ignore[no-untyped-def]
    """To the nearest float16."""
    return to_float32(from_float32(number, _HALF))
