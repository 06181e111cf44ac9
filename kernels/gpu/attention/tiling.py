"""How paged attention is cut for a kind of model on a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kernels.gpu.architectures import TENSOR_MEMORY

# Of 128 rows and three tiles of 64 keys and values with heads of 128; and of 64 rows and tiles of 32 with heads of 256.
_LARGE_SHARED_BYTES = 132 * 1024
# Elements: with the next larger ones a block of most cards has too little shared memory for its tiles, and none is
# compiled. The latents of latent attention have tiles of their own.
MAX_HEAD_SIZE = 256
ALL_REGISTERS = 255  # of a thread: left alone, the assembler spills a few for more threads than shared memory lets run


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
    # A row's weights are summed by a product with ones. Triton shares the rows and keys of a tile out to warps by the
    # tile's shape, and a sum over threads follows that; one by the matrix units runs over keys in order whatever it is.
    sums_are_products: bool = False


def padded(head_size: int) -> int:
    """To a power of 2, and to what matrix units multiply at least."""
    size: int = triton.next_power_of_2(head_size)
    return max(size, 16)


def tiling(
    head_size: int,
    element_size: int,
    group: int,
    capability: int,
    max_shared_bytes: int,
    *,
    is_batch_invariant: bool = False,
) -> Tiling:
    """As large as registers allow: a thread holds two sums of its rows' values, of the segment and of the span.

    A token's bits are the same in both kernels: they have tiles of one shape, or matrix units that give a row the same
    sums in any. Of cards with tensor memory nobody knows that, so there prompts have the rows of decode steps where
    `is_batch_invariant`.

    element_size in bytes, of queries; capability 90 is Hopper; max_shared_bytes: what the card gives one block.
    """
    head_tile = padded(head_size)
    if element_size > 2:
        # Multiplied without matrix units, by tiles of one shape, which shares a row's keys out to threads.
        return Tiling(16, 32, 8, 32, 8, 2, 1, 1)
    # Hopper's and large Blackwells' matrix units read keys from shared memory; others are given them in registers.
    # Triton 3.6, 3.7 and 3.9 differ in how many registers they use: with these tiles none spills in its loop.
    from_registers = not 90 <= capability < 120
    is_large = not from_registers and max_shared_bytes >= _LARGE_SHARED_BYTES
    if head_tile > 128:
        # Both kernels' tiles have one shape, and so one order of sums. (On an H200 twice as many rows and keys were
        # 1.5 times as fast in prompts, and took 1.7 times as long in decode steps.)
        return Tiling(32 if is_large else 16, 64, 8, 64, 8, 3, 1, 1)
    decode_rows = 64 if group <= 64 else 128
    prefill_rows = decode_rows if is_batch_invariant and capability in TENSOR_MEMORY else 128
    key_tile = 64 if is_large or head_tile <= 64 else 32
    joins = capability < 100 or (from_registers and head_tile <= 64)
    sizes = (key_tile, prefill_rows, prefill_rows // 16, decode_rows, decode_rows // 16, 3, 2, 1)
    return Tiling(*sizes, joins=joins, sums_are_products=from_registers)
