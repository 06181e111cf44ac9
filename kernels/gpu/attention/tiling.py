"""How paged attention is cut for a kind of model on a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

import triton

# Of 64 rows and two tiles of 32 keys and values with heads of 256; and of two blocks with three such tiles of 128.
_LARGE_SHARED_BYTES = 108_544
ALL_REGISTERS = 255  # of a thread: left alone, the assembler spills a few for more threads than shared memory lets run
JOIN_REGISTERS = 168  # of a thread of the kernel that joins pieces, for the same reason


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of tiles and of grids."""

    key_tile: int
    prefill_rows: int
    prefill_warps: int
    decode_rows: int
    decode_warps: int
    stages: int  # tiles of keys and values in use or on their way
    decode_programs: int  # that one multiprocessor holds at once
    prefill_programs: int
    joins: bool = False  # segments are joined in the loop over tiles, not around it: registers allow it


def padded(head_size: int) -> int:
    """To a power of 2, and to what matrix units multiply at least."""
    size: int = triton.next_power_of_2(head_size)
    return max(size, 16)


def tiling(
    head_size: int, element_size: int, group: int, capability: int, max_shared_bytes: int, *, has_soft_cap: bool
) -> Tiling:
    """As large as registers allow: a thread holds two sums of its rows' values, of the segment and of the span.

    element_size in bytes, of queries; capability 90 is Hopper; max_shared_bytes: what the card gives one block. A
    model has as many warps to a row in both kernels: sums over keys then run in the same order.
    """
    head_tile = padded(head_size)
    decode_rows = max(64, triton.next_power_of_2(group))
    has_matrix_memory = 90 <= capability < 120  # smaller cards of Blackwell multiply out of registers, as Ampere does
    if element_size > 2:
        # Multiplied without matrix units.
        return Tiling(16, 32, 8, max(32, triton.next_power_of_2(group)), 8, 2, 1, 1)
    if head_tile > 128:
        key_tile = 32 if has_matrix_memory and max_shared_bytes >= _LARGE_SHARED_BYTES else 16
        return Tiling(key_tile, 64, 8, decode_rows, decode_rows // 8, 3, 1, 1)
    # Hopper's matrix units read queries and keys from shared memory; others take them from registers. Triton 3.6, 3.7
    # and 3.9 differ in how many they use: with these tiles none spills in its loop.
    if 90 <= capability < 100 and not has_soft_cap:
        key_tile = 64
    elif max_shared_bytes < _LARGE_SHARED_BYTES or (capability >= 100 and head_size < head_tile):
        key_tile = 16
    else:
        key_tile = 32
    return Tiling(key_tile, 128, 8, decode_rows, decode_rows // 16, 3, 2, 1, joins=capability < 100)
