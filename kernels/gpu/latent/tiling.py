"""How latent attention is cut for a model and a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.attention.tiling import padded

ALL_REGISTERS = 255  # of a thread
_BUFFERS = 2  # of tiles of keys, in use or on their way: what `num_stages` 3 asks for
_STAGES = 3


@dataclass(frozen=True, slots=True)
class LatentTiling:
    """Sizes of tiles and of grids; the same in both kernels, so that sums over keys run in one order."""

    rows: int  # pairs of a token and a head
    key_tile: int
    num_warps: int
    stages: int
    programs: int  # that one multiprocessor holds at once
    joined_heads: int  # that the kernel which joins pieces takes at once
    joins: bool = False  # segments are joined in the loop over tiles, not around it: registers allow it


def latent_tiling(
    num_heads: int, latent_size: int, rotary_size: int, element_size: int, capability: int, max_shared_bytes: int
) -> LatentTiling:
    """A thread holds two sums of its rows' latents, of the segment and of the span: with 32 rows of 512 by 256 threads
    half of its registers. Blackwell's assembler spills in the loop over tiles where both are used there.

    element_size in bytes, of queries; capability 90 is Hopper; max_shared_bytes: what the card gives one block.
    """
    joined_heads = 2 if num_heads % 2 == 0 else 1
    if element_size > 2:  # multiplied without matrix units
        return LatentTiling(16, 16, 8, 2, 1, joined_heads)
    rows = 16 if num_heads <= 16 else 32
    line_bytes = (padded(latent_size) + padded(rotary_size)) * element_size
    key_tile = 32 if (rows + _BUFFERS * 32) * line_bytes <= max_shared_bytes else 16
    programs = max(1, min(2, max_shared_bytes // ((rows + _BUFFERS * key_tile) * line_bytes))) if rows == 16 else 1
    return LatentTiling(rows, key_tile, rows // 4, _STAGES, programs, joined_heads, joins=capability < 100)
