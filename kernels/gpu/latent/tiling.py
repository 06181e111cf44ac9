"""How latent attention is cut for a model and a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.attention.tiling import padded

ALL_REGISTERS = 255  # of a thread
_BUFFERS = 2  # of tiles of keys, in use or on their way: what `num_stages` 3 asks for
_STAGES = 3


@dataclass(frozen=True, slots=True)
class LatentTiling:
    """Sizes of tiles and of grids. Both kernels have tiles of as many keys, and as many warps to a row: sums over keys
    run in one order."""

    whole_rows: int  # pairs of a token and a head
    piece_rows: int
    key_tile: int
    rows_of_warp: int
    stages: int
    piece_programs: int  # that one multiprocessor holds at once
    joined_heads: int  # that the kernel which joins pieces takes at once
    joins: bool = False  # segments are joined in the loop over tiles, not around it: registers allow it


def latent_tiling(
    num_heads: int, latent_size: int, rotary_size: int, element_size: int, capability: int, max_shared_bytes: int
) -> LatentTiling:
    """A thread holds two sums of its rows' latents, of the segment and of the span: with 32 rows of 512 by 256 threads
    half of its registers. Blackwell's assembler spills in the loop over tiles where both are used there. Single tokens
    of up to 16 heads have half of these rows, and two programs take the place of one.

    element_size in bytes, of queries; capability 90 is Hopper; max_shared_bytes: what the card gives one block.
    """
    joined_heads = 2 if num_heads % 2 == 0 else 1
    if element_size > 2:  # multiplied without matrix units
        return LatentTiling(16, 16, 16, 2, 2, 1, joined_heads)
    line_bytes = (padded(latent_size) + padded(rotary_size)) * element_size
    key_tile = 32 if (32 + _BUFFERS * 32) * line_bytes <= max_shared_bytes else 16
    rows = 16 if num_heads <= 16 else 32
    has_two = rows == 16 and 2 * (rows + _BUFFERS * key_tile) * line_bytes <= max_shared_bytes
    return LatentTiling(32, rows, key_tile, 4, _STAGES, 1 + has_two, joined_heads, joins=capability < 100)
