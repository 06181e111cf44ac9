"""How a product with a weight of few bits is cut: into tiles of outputs and rows, and its sums into segments of chunks.

A segment is summed from zero, and the segments' sums are added in order, by one program or, where few rows would leave
most of a GPU idle, by a second kernel from what one program a segment has left. Segments follow from the weight alone:
the same numbers are added in the same order for any number of rows.
"""

from __future__ import annotations

import triton

from kernels.gpu.quantized.packed_codes import TILE

MOST_ROWS = 64  # of a tile
WANTED_PROGRAMS = 264  # two on each processor of a large GPU: one's loads are on their way while the other multiplies
_MAX_SEGMENTS = 8
_MIN_CHUNKS = 4  # of a segment


def chunks_of_segment(num_outputs: int, num_chunks: int) -> int:
    """For a weight with so many outputs and chunks: how many of these are summed from zero."""
    wanted = triton.cdiv(WANTED_PROGRAMS, triton.cdiv(num_outputs, TILE))
    segments = max(min(wanted, _MAX_SEGMENTS, num_chunks // _MIN_CHUNKS), 1)
    return int(triton.cdiv(num_chunks, segments))


def block_m_of(count: int) -> int:
    """Rows of a tile, where there are so many; a row's sum is the same in each."""
    return min(max(int(triton.next_power_of_2(count)), 16), MOST_ROWS)


def is_split(count: int, num_outputs: int, num_chunks: int) -> bool:
    """Whether each segment has a program of its own: besides the tile, all that the number of rows decides."""
    num_tiles = triton.cdiv(count, block_m_of(count)) * triton.cdiv(num_outputs, TILE)
    return chunks_of_segment(num_outputs, num_chunks) < num_chunks and num_tiles < WANTED_PROGRAMS
