"""How paged attention is cut for a kind of model on a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

import triton

_ALL_REGISTERS = 255  # left alone, the assembler spills a few for more threads than shared memory lets run


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
    prefill_registers: int | None = None  # of a thread at most; where it is not said the assembler chooses
    decode_registers: int | None = _ALL_REGISTERS


def tiling(head_tile: int, element_size: int, group: int, capability: int, *, has_soft_cap: bool) -> Tiling:
    """As large as registers allow: a prefill thread holds two sums of its rows' values, of the segment and of all.

    head_tile: the head size, padded to a power of 2; element_size in bytes, of queries; capability 90 is Hopper. A
    model has as many warps to a row in both kernels: sums over keys then run in the same order.
    """
    decode_rows = max(64, triton.next_power_of_2(group))
    if element_size > 2:
        # Multiplied without matrix units.
        return Tiling(16, 32, 8, max(32, triton.next_power_of_2(group)), 8, 2, 1, 1, _ALL_REGISTERS)
    if head_tile > 128:
        return Tiling(32, 64, 8, decode_rows, decode_rows // 8, 3, 1, 1)
    # Hopper's matrix units read queries and keys from shared memory; others take them from registers. Triton 3.6, 3.7
    # and 3.9 differ in how many they use: with these tiles none spills.
    key_tile = 16 if capability < 90 else 64 if capability < 100 and not has_soft_cap else 32
    return Tiling(key_tile, 128, 8, decode_rows, decode_rows // 16, 3, 2, 1)
