"""Which sequences hold how much of paged attention's work: what lets a fixed number of programs share it evenly.

A graph of kernels is captured once for all batches of a size. Its grids cannot follow the lengths of sequences, and a
grid made for the longest that may come (256 sequences, 8 heads, 256 segments of 131,072 keys: half a million programs)
would mostly start programs that have nothing to do. So a grid is as large as the GPU, and each program counts the work
of all sequences itself, CHUNK of them at a time, to find its share: it reads a few kilobytes, out of the second cache.

A sequence with one new token is decode: its work is counted in tiles of keys. One with more is prefill, counted in
tiles of rows. The two kernels see each other's sequences as empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
# Arguments that differ from step to step: compiled for their divisors, a kernel would be compiled while serving.
OF_A_STEP = ("block_tables", "seq_lens", "query_starts", "num_sequences", "max_segments", "table_stride")


@triton.jit
def decode_tiles(  # type: ignore[no-untyped-def]
    sequences, num_sequences, seq_lens, query_starts, window, KEY_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Tiles of keys that the one new token of each sequence sees, and the first of them."""
    inside = sequences < num_sequences
    query_len = tl.load(query_starts + sequences + 1, inside, 0) - tl.load(query_starts + sequences, inside, 0)
    seq_len = tl.load(seq_lens + sequences, inside, 0)
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // KEY_TILE
    return tl.where(query_len == 1, tl.cdiv(seq_len, KEY_TILE) - first, 0), first


@triton.jit
def prefill_tiles(sequences, num_sequences, query_starts, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of rows of each sequence that has several new tokens."""
    inside = sequences < num_sequences
    query_len = tl.load(query_starts + sequences + 1, inside, 0) - tl.load(query_starts + sequences, inside, 0)
    return tl.where(query_len > 1, tl.cdiv(query_len * GROUP, ROWS), 0)
