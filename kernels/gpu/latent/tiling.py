"""How latent attention is cut for a model and a GPU. Nothing here knows a batch: bits depend on these numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.attention.tiling import padded

ALL_REGISTERS = 255  # of a thread
_BUFFERS = 2  # of tiles of keys, in use or on their way: what `num_stages` 3 asks for


@dataclass(frozen=True, slots=True)
class LatentCut:
    """Of one of the two kernels."""

    rows: int  # of a tile: pairs of a token and a head
    key_tile: int
    num_warps: int
    stages: int
    joins: bool  # segments are joined in the loop over tiles, not around it: registers allow it


@dataclass(frozen=True, slots=True)
class LatentTiling:
    """Of both. Where their cuts are equal, so are the bits of a token that is computed by either."""

    whole: LatentCut
    pieces: LatentCut
    piece_programs: int  # that one multiprocessor holds at once
    joined_heads: int  # that the kernel which joins pieces takes at once


def latent_tiling(
    num_heads: int,
    latent_size: int,
    rotary_size: int,
    element_size: int,
    capability: int,
    max_shared_bytes: int,
    *,
    is_batch_invariant: bool,
) -> LatentTiling:
    """A thread holds two sums of its rows' latents, of the segment and of the span: with 32 rows of 512 by 256 threads
    half of its registers. Blackwell's assembler spills in the loop over tiles where both are used there. Single tokens
    of up to 16 heads have half of these rows, and two programs take the place of one.

    Hopper's matrix units take 64 rows at once, twice as fast as 32 as other cards do: its sums of a span wait in memory
    while a segment is added up. Few rows are as fast with less, and so a token's bits depend on which kernel computes
    it, and that on the batch, unless `is_batch_invariant`: then both kernels have the cut for few rows.

    element_size in bytes, of queries; capability 90 is Hopper; max_shared_bytes: what the card gives one block.
    """
    joined_heads = 2 if num_heads % 2 == 0 else 1
    if element_size > 2:  # multiplied without matrix units
        cut = LatentCut(16, 16, 8, 2, joins=False)
        return LatentTiling(cut, cut, 1, joined_heads)
    line_bytes = (padded(latent_size) + padded(rotary_size)) * element_size
    key_tile = 32 if (32 + _BUFFERS * 32) * line_bytes <= max_shared_bytes else 16
    joins = capability < 100
    medium, few = (LatentCut(rows, key_tile, rows // 4, 3, joins) for rows in (32, 16))
    whole, pieces = medium, medium if num_heads > 16 else few
    if 90 <= capability < 100 and (64 + 64) * line_bytes <= max_shared_bytes:
        whole = LatentCut(64, 64, 8, 2, joins=False)
        pieces = whole if num_heads >= 64 else pieces
    if is_batch_invariant:
        whole = pieces
    has_two = pieces.rows == 16 and 2 * (16 + _BUFFERS * key_tile) * line_bytes <= max_shared_bytes
    return LatentTiling(whole, pieces, 1 + has_two, joined_heads)
