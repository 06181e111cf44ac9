"""How a product with a weight of few bits is cut: into tiles of outputs and rows, and its sums into segments of chunks.

A segment is summed from zero, and the segments' sums are added in order, by one program or, where few rows would leave
most of a GPU idle, by a second kernel from what one program a segment has left. Segments follow from the weight alone:
the same numbers are added in the same order for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu.quantized.packed_codes import TILE
from kernels.gpu.tiles import cdiv, next_power_of_2

MOST_ROWS = 64  # of a tile
WANTED_PROGRAMS = 264  # two on each processor of a large GPU: one's loads are on their way while the other multiplies
_MAX_SEGMENTS = 8
_MIN_CHUNKS = 4  # of a segment


def chunks_of_segment(num_outputs: int, num_chunks: int) -> int:
    """For a weight with so many outputs and chunks: how many of these are summed from zero."""
    wanted = cdiv(WANTED_PROGRAMS, cdiv(num_outputs, TILE))
    segments = max(min(wanted, _MAX_SEGMENTS, num_chunks // _MIN_CHUNKS), 1)
    return cdiv(num_chunks, segments)


def block_m_of(count: int) -> int:
    """Rows of a tile, where there are so many; a row's sum is the same in each."""
    return min(max(next_power_of_2(count), 16), MOST_ROWS)


@dataclass(frozen=True, slots=True)
class Cut:
    """A product of some rows."""

    block_m: int
    segment: int  # chunks that are summed from zero
    num_segments: int
    is_split: bool  # whether each segment has a program of its own: besides the tile, all that the rows' number decides
    grid: tuple[int, int]

    @classmethod
    def of(cls, count: int, num_outputs: int, num_chunks: int) -> Cut:
        """Of `count` rows by a weight with so many outputs and chunks."""
        block_m, segment = block_m_of(count), chunks_of_segment(num_outputs, num_chunks)
        num_tiles, num_segments = cdiv(count, block_m) * cdiv(num_outputs, TILE), cdiv(num_chunks, segment)
        is_split = num_segments > 1 and num_tiles < WANTED_PROGRAMS
        return cls(block_m, segment, num_segments, is_split, (num_tiles, num_segments if is_split else 1))

    def parts(self, out: torch.Tensor) -> torch.Tensor:
        """Where programs store: f32[segments * T, N] for what a second kernel adds up, or `out` [T, N] itself."""
        if not self.is_split:
            return out
        return out.new_empty((self.num_segments * len(out), out.shape[1]), dtype=torch.float32)
