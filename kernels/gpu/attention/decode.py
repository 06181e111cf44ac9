"""Paged attention of the split sequences: pieces of their keys, shared out evenly, then joined in order.

    sequence 0, head 0             sequence 0, head 1             sequence 1, head 0
    |piece 0|piece 1|piece 2|p 3|  |piece 0|piece 1|piece 2|p 3|  |piece 0|p|   ...
    |-- share 0 --|-- share 1 -|   |-- share 2 --|------ share 3 ------| ...

All tiles of keys lie in a row, sequence by sequence, head by head, and are cut into equal shares, one a program. Of a
share belong to it the pieces that begin in it: no program has more than a piece more to do than another. A sequence
with more new tokens than one tile of rows holds comes once for each tile, piece by piece, so that the same keys are
read one right after the other. Shares depend on the batch; the segments of which pieces consist do not:

    sums f32[num_lines, num_heads, head_size], maxima and totals f32[num_lines, num_heads]

have a line for each token and piece (`work`). Then `join_kernel` adds a token's pieces from the first to the
last, those of a span by themselves. A tile has 64 rows, as many as the matrix units are given at least: 64 / group
tokens cost what one costs, because time is spent on reading keys. Products of this shape are the same instructions as
in the prefill kernel, so that a token has the same bits there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.rows import attend_rows, seen_keys
from kernels.gpu.attention.segment import SEGMENT, SPAN, finish, join
from kernels.gpu.attention.work import FIRST_LINE, OF_A_STEP, PIECE, SPLIT_END, TOKEN_END, needed_keys, sequence_of


@triton.jit(do_not_specialize=OF_A_STEP)
def segment_kernel(  # type: ignore[no-untyped-def]
    sums,
    maxima,
    totals,
    plan,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_starts,
    alibi_slopes,
    key_scale,
    num_sequences,
    num_kv_heads,
    query_stride,
    block_lines,
    table_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    JOINS: tl.constexpr,
    SUMS_ARE_PRODUCTS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """One program a share of tiles: unnormalised sums, maxima and totals of each piece, to be joined."""
    ends = plan + SPLIT_END * num_sequences
    all_tiles = tl.load(ends + num_sequences - 1).to(tl.int64) * num_kv_heads
    # A GPU deals its first programs out to all multiprocessors: so are neighbouring shares, of which some may be empty.
    multiprocessors = tl.num_programs(0) // PROGRAMS
    share = tl.program_id(0) % multiprocessors * PROGRAMS + tl.program_id(0) // multiprocessors
    begin = all_tiles * share // tl.num_programs(0)
    end = all_tiles * (share + 1) // tl.num_programs(0)
    sequence, base = sequence_of(ends, num_sequences, begin, num_kv_heads)
    while base < end:
        if tl.load(ends + sequence).to(tl.int64) * num_kv_heads > base:
            seq_len, query_start = tl.load(seq_lens + sequence), tl.load(query_starts + sequence)
            query_len = tl.load(query_starts + sequence + 1) - query_start
            piece_size = tl.load(plan + PIECE * num_sequences + sequence) * SEGMENT
            row_tiles = tl.cdiv(query_len * GROUP, ROWS)
            first_key = needed_keys(seq_len, query_len, window, HAS_WINDOW)
            first_tile, end_tile = first_key // KEY_TILE, tl.cdiv(seq_len, KEY_TILE)
            first_piece = first_key // piece_size
            num_pieces = tl.cdiv(seq_len, piece_size) - first_piece
            of_head = num_pieces * row_tiles
            tiles = piece_size // KEY_TILE
            from_item = item_at(begin - base, num_kv_heads, first_tile, end_tile, tiles, row_tiles, of_head)
            to_item = item_at(end - base, num_kv_heads, first_tile, end_tile, tiles, row_tiles, of_head)
            for item in range(from_item, to_item):
                head, place = item // of_head, item % of_head
                piece, first_row = first_piece + place // row_tiles, place % row_tiles * ROWS
                first_seen, end_seen = seen_keys(seq_len, query_len, first_row, window, GROUP, ROWS, HAS_WINDOW)
                first, end_key = piece * piece_size, tl.minimum((piece + 1) * piece_size, end_seen)
                # Of the first tokens the last keys are no piece, and of the last tokens, with a window, the first ones.
                if (first < end_seen) & (end_key > first_seen):
                    m, total, acc = attend_rows(
                        query,
                        key_cache,
                        value_cache,
                        block_tables + sequence.to(tl.int64) * table_stride,
                        seq_len,
                        query_start,
                        query_len,
                        alibi_slopes,
                        key_scale,
                        head,
                        first_row,
                        tl.maximum(first, first_seen) // SEGMENT,
                        tl.cdiv(end_key, SEGMENT),
                        query_stride,
                        block_lines,
                        scale,
                        soft_cap,
                        window,
                        GROUP,
                        KEY_TILE,
                        BLOCK_SIZE,
                        HEAD_SIZE,
                        HEAD_TILE,
                        ROWS,
                        HAS_WINDOW,
                        HAS_SOFT_CAP,
                        JOINS,
                        SUMS_ARE_PRODUCTS,
                        DOT_TYPE,
                    )
                    # Read here, and below again: what waits for so long takes registers from the loop over keys.
                    first_line = tl.load(plan + FIRST_LINE * num_sequences + sequence).to(tl.int64)
                    rows, dims = first_row + tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
                    tokens = rows // GROUP
                    lines = first_line + (piece - first_piece) * query_len + tokens
                    lines = lines * (num_kv_heads * GROUP) + head * GROUP + rows % GROUP
                    tl.store(maxima + lines, m, tokens < query_len)
                    tl.store(totals + lines, total, tokens < query_len)
                    inside = (tokens < query_len)[:, None] & (dims < HEAD_SIZE)[None, :]
                    tl.store(sums + (lines * HEAD_SIZE)[:, None] + dims[None, :], acc, inside)
        base = tl.load(ends + sequence).to(tl.int64) * num_kv_heads
        sequence += 1


@triton.jit
def item_at(place, num_kv_heads, first_tile, end_tile, tiles, row_tiles, of_head):  # type: ignore[no-untyped-def]
    """The first item that begins at tile `place` of a sequence, or later; items are heads, of these pieces of `tiles`
    tiles of keys, counted from the sequence's first key, of these tiles of rows."""
    work_of_head = (end_tile - first_tile).to(tl.int64) * row_tiles
    inside = tl.minimum(tl.maximum(place, 0), work_of_head * num_kv_heads)
    head, inside = (inside // work_of_head).to(tl.int32), inside % work_of_head
    piece = (first_tile + inside // row_tiles).to(tl.int32) // tiles
    begin = tl.maximum(piece * tiles, first_tile)
    length = tl.minimum((piece + 1) * tiles, end_tile) - begin
    row_tile = tl.cdiv(inside - (begin - first_tile).to(tl.int64) * row_tiles, length).to(tl.int32)
    return head * of_head + (piece - first_tile // tiles) * row_tiles + row_tile


@triton.jit(do_not_specialize=OF_A_STEP)
def join_kernel(  # type: ignore[no-untyped-def]
    out,
    sums,
    maxima,
    totals,
    plan,
    seq_lens,
    query_starts,
    sinks,
    value_scale,
    num_sequences,
    num_tiles,
    out_stride,
    window,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    HEADS_OF_SCALE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Programs take tokens, tiles of HEADS heads and tiles of their elements in turn: each row's pieces from first to
    last, zeros without any. `num_tiles` of heads; HEADS_OF_SCALE: heads for which values have one scale."""
    PARTS: tl.constexpr = (HEAD_SIZE + DIMS_TILE - 1) // DIMS_TILE
    ends = plan + TOKEN_END * num_sequences
    num_items = tl.load(ends + num_sequences - 1) * num_tiles * PARTS
    # All in two dimensions, as sums are loaded: no number has to change threads, and nothing waits for that.
    rows = tl.arange(0, HEADS_TILE)[:, None]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        dims = item % PARTS * DIMS_TILE + tl.arange(0, DIMS_TILE)[None, :]
        inside = (rows < HEADS) & (dims < HEAD_SIZE)
        tile = item // PARTS % num_tiles
        sequence, before = sequence_of(ends, num_sequences, item // PARTS // num_tiles, 1)
        token = item // PARTS // num_tiles - before.to(tl.int32)
        seq_len, query_start = tl.load(seq_lens + sequence), tl.load(query_starts + sequence)
        query_len = tl.load(query_starts + sequence + 1) - query_start
        piece_size = tl.load(plan + PIECE * num_sequences + sequence) * SEGMENT
        first_piece = needed_keys(seq_len, query_len, window, HAS_WINDOW) // piece_size
        end_key = seq_len - query_len + token + 1
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(end_key - window, 0)
        heads = tile * HEADS + rows
        first_line = tl.load(plan + FIRST_LINE * num_sequences + sequence).to(tl.int64)
        first_line += token - first_piece * query_len
        m, total, acc = _nothing(HEADS_TILE, DIMS_TILE)
        for span in range(first_key // (SEGMENT * SPAN), tl.cdiv(end_key, SEGMENT * SPAN)):
            begin = tl.maximum(span * (SEGMENT * SPAN), first_key) // piece_size
            end = tl.cdiv(tl.minimum((span + 1) * (SEGMENT * SPAN), end_key), piece_size)
            of_span_m, of_span_total, of_span_acc = _nothing(HEADS_TILE, DIMS_TILE)
            for piece in tl.range(begin, end, loop_unroll_factor=8):
                lines = (first_line + piece * query_len) * (num_tiles * HEADS) + heads
                next_m = tl.load(maxima + lines, rows < HEADS, float("-inf"))
                next_total = tl.load(totals + lines, rows < HEADS, 0.0)
                next_acc = tl.load(sums + lines * HEAD_SIZE + dims, inside, 0.0)
                of_span_m, of_span_total, of_span_acc = join(
                    of_span_m, of_span_total, of_span_acc, next_m, next_total, next_acc
                )
            m, total, acc = join(m, total, acc, of_span_m, of_span_total, of_span_acc)
        result = finish(m, total, acc, sinks, heads, value_scale, tile * HEADS // HEADS_OF_SCALE, rows < HEADS)
        places = (query_start + token).to(tl.int64) * out_stride + heads * HEAD_SIZE + dims
        tl.store(out + places, result.to(out.dtype.element_ty), inside)


@triton.jit
def _nothing(HEADS_TILE: tl.constexpr, DIMS_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The result over no keys."""
    m, total = tl.full([HEADS_TILE, 1], float("-inf"), tl.float32), tl.zeros([HEADS_TILE, 1], tl.float32)
    return m, total, tl.zeros([HEADS_TILE, DIMS_TILE], tl.float32)
