"""Tiles of kernels that are bound by memory: so that each thread has a few 16-byte accesses under way at once.

Chosen by the width of a row alone, never by how many rows there are.
"""

from __future__ import annotations

from functools import cache

_ELEMENTS_OF_A_THREAD = 16  # two or four accesses of 16 bytes to each tensor
_ELEMENTS_OF_A_PROGRAM = 2048  # where a row does not set it: four warps
MAX_ROW = 32768  # elements: 32 of a row in each of 1,024 threads


def cdiv(count: int, size: int) -> int:
    """How many of `size` hold `count`. For launchers: called on the host, Triton's own takes a microsecond or two."""
    return -(-count // size)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is no less; `size` is at least 1. See `cdiv`."""
    return 1 << (size - 1).bit_length()


@cache
def whole_rows(size: int) -> tuple[int, int, int]:
    """(rows, elements, warps) of a tile that holds whole rows of `size` elements, padded to a power of 2.

    Raises ValueError for rows that do not fit in a program's registers.
    """
    if size > MAX_ROW:
        raise ValueError(f"a row of {size} elements does not fit in registers; {MAX_ROW} is the most")
    block = next_power_of_2(size)
    rows = max(1, _ELEMENTS_OF_A_PROGRAM // block)
    return rows, block, min(rows * block // (32 * _ELEMENTS_OF_A_THREAD), 32)


@cache
def part_of_row(size: int) -> tuple[int, int]:
    """(elements, warps) of a tile of one row, where each element counts for itself: the one that wastes least."""
    blocks = [_ELEMENTS_OF_A_PROGRAM >> shift for shift in range(3)]
    block = min(blocks, key=lambda block: -(-size // block) * block)  # of equals the largest, which comes first
    return block, block // (32 * _ELEMENTS_OF_A_THREAD)
