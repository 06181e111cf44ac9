"""Latent attention of the split sequences: pieces of their keys, shared out evenly, to be joined in order.

As `kernels.gpu.attention.decode`, which draws it, with one key/value head, of which all heads are the group; that
file's `join_kernel` then joins the pieces of some heads at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.decode import item_at
from kernels.gpu.attention.segment import SEGMENT
from kernels.gpu.attention.work import FIRST_LINE, OF_A_STEP, PIECE, SPLIT_END, sequence_of
from kernels.gpu.latent.rows import attend_latents, end_of_keys


@triton.jit(do_not_specialize=OF_A_STEP)  # type: ignore[untyped-decorator]  # Triton has no types
def pieces_kernel(  # type: ignore[no-untyped-def]
    sums,
    maxima,
    totals,
    plan,
    query,
    cache,
    block_tables,
    seq_lens,
    query_starts,
    num_sequences,
    query_stride,
    block_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    JOINS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """One program a share of tiles: unnormalised sums, maxima and totals of each piece."""
    ends = plan + SPLIT_END * num_sequences
    all_tiles = tl.load(ends + num_sequences - 1).to(tl.int64)
    multiprocessors = tl.num_programs(0) // PROGRAMS
    share = tl.program_id(0) % multiprocessors * PROGRAMS + tl.program_id(0) // multiprocessors
    begin = all_tiles * share // tl.num_programs(0)
    end = all_tiles * (share + 1) // tl.num_programs(0)
    sequence, base = sequence_of(ends, num_sequences, begin, 1)
    while base < end:
        if tl.load(ends + sequence).to(tl.int64) > base:
            seq_len, query_start = tl.load(seq_lens + sequence), tl.load(query_starts + sequence)
            query_len = tl.load(query_starts + sequence + 1) - query_start
            piece_size = tl.load(plan + PIECE * num_sequences + sequence) * SEGMENT
            row_tiles = tl.cdiv(query_len * HEADS, ROWS)
            end_tile = tl.cdiv(seq_len, KEY_TILE)
            num_items = tl.cdiv(seq_len, piece_size) * row_tiles
            tiles = piece_size // KEY_TILE
            from_item = item_at(begin - base, 1, 0, end_tile, tiles, row_tiles, num_items)
            to_item = item_at(end - base, 1, 0, end_tile, tiles, row_tiles, num_items)
            for item in range(from_item, to_item):
                piece, first_row = item // row_tiles, item % row_tiles * ROWS
                first = piece * piece_size
                end_key = tl.minimum(first + piece_size, end_of_keys(seq_len, query_len, first_row, HEADS, ROWS))
                if first < end_key:  # of the first tokens the last keys are no piece
                    m, total, acc = attend_latents(
                        query,
                        cache,
                        block_tables + sequence.to(tl.int64) * table_stride,
                        seq_len,
                        query_start,
                        query_len,
                        first_row,
                        first // SEGMENT,
                        tl.cdiv(end_key, SEGMENT),
                        query_stride,
                        block_stride,
                        scale,
                        HEADS,
                        KEY_TILE,
                        BLOCK_SIZE,
                        LATENT,
                        LATENT_TILE,
                        TURNED,
                        TURNED_TILE,
                        ROWS,
                        JOINS,
                        DOT_TYPE,
                    )
                    # Read here, and below again: what waits for so long takes registers from the loop over keys.
                    first_line = tl.load(plan + FIRST_LINE * num_sequences + sequence).to(tl.int64)
                    rows, dims = first_row + tl.arange(0, ROWS), tl.arange(0, LATENT_TILE)
                    tokens = rows // HEADS
                    lines = (first_line + piece * query_len + tokens) * HEADS + rows % HEADS
                    tl.store(maxima + lines, m, tokens < query_len)
                    tl.store(totals + lines, total, tokens < query_len)
                    inside = (tokens < query_len)[:, None] & (dims < LATENT)[None, :]
                    tl.store(sums + (lines * LATENT)[:, None] + dims[None, :], acc, inside)
        base = tl.load(ends + sequence).to(tl.int64)
        sequence += 1
