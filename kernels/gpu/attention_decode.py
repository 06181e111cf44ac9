"""Paged attention of sequences with one new token: the context in segments, shared out evenly, then joined in order.

    sequence 0, head 0             sequence 0, head 1             sequence 1, head 0
    |seg 0 |seg 1 |seg 2 |seg 3|   |seg 0 |seg 1 |seg 2 |seg 3|   |seg 0 |s|   ...
    |-- share 0 --|-- share 1 -|   |-- share 2 --|------ share 3 ------| ...

All tiles of keys lie in a row, sequence by sequence, head by head, and are cut into equal shares, one a program. Of a
share belong to it the segments that begin in it: no program has more than a segment more to do than another. Shares
depend on the batch; segments do not, and each is summed by one program and written for itself:

    sums f32[S, num_heads, max_segments, head_size], maxima and totals f32[S, num_heads, max_segments]

Then `join_kernel` adds a row's segments from the first to the last. A tile has the rows of one key/value head's group,
a few of the 64 that the matrix units are given: time is spent on reading keys, and products of this shape are the same
instructions as in the prefill kernel, so that a token has the same bits there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention_segment import LOG2_E, SEGMENT, attend_segment, join
from kernels.gpu.attention_work import CHUNK, OF_A_STEP, decode_tiles


@triton.jit(do_not_specialize=OF_A_STEP)
def segment_kernel(  # type: ignore[no-untyped-def]
    sums,
    maxima,
    totals,
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
    max_segments,
    query_stride,
    block_stride,
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
    DOT_TYPE: tl.constexpr,
):
    """One program a share of tiles: unnormalised sums, maxima and totals of each segment, to be joined."""
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    all_tiles = tl.zeros([], tl.int64)
    for chunk in range(0, num_sequences, CHUNK):
        tiles, _ = decode_tiles(
            chunk + tl.arange(0, CHUNK), num_sequences, seq_lens, query_starts, window, KEY_TILE, HAS_WINDOW
        )
        all_tiles += tl.sum(tiles)
    all_tiles *= num_kv_heads
    # A GPU deals its first programs out to all multiprocessors: so are neighbouring shares, of which some may be empty.
    multiprocessors = tl.num_programs(0) // PROGRAMS
    share = tl.program_id(0) % multiprocessors * PROGRAMS + tl.program_id(0) // multiprocessors
    begin = all_tiles * share // tl.num_programs(0)
    end = all_tiles * (share + 1) // tl.num_programs(0)

    # The sequence in which this program begins, and where that one's tiles do.
    sequence = tl.zeros([], tl.int32)
    base, seen = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for chunk in range(0, num_sequences, CHUNK):
        tiles, _ = decode_tiles(
            chunk + tl.arange(0, CHUNK), num_sequences, seq_lens, query_starts, window, KEY_TILE, HAS_WINDOW
        )
        is_before = (seen + tl.cumsum(tiles)) * num_kv_heads <= begin
        sequence += tl.sum(is_before.to(tl.int32))
        base += tl.sum(tl.where(is_before, tiles, 0)) * num_kv_heads
        seen += tl.sum(tiles)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
    inside = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    while base < end:
        tiles, first_tile = decode_tiles(sequence, num_sequences, seq_lens, query_starts, window, KEY_TILE, HAS_WINDOW)
        seq_len = tl.load(seq_lens + sequence)
        token = tl.load(query_starts + sequence).to(tl.int64)
        table = block_tables + sequence.to(tl.int64) * table_stride
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(seq_len - window, 0)
        for head in range(num_kv_heads):
            start = base + head * tiles
            from_tile = _border(begin - start, first_tile, tiles, TILES)
            to_tile = _border(end - start, first_tile, tiles, TILES)
            if from_tile < to_tile:
                heads = head * GROUP + rows
                line = token * query_stride
                q = tl.load(query + line + (heads * HEAD_SIZE)[:, None] + dims[None, :], inside, 0.0).to(DOT_TYPE)
                positions = tl.full([ROWS], 0, tl.int32) + (seq_len - 1)
                slopes = tl.zeros([ROWS], tl.float32)
                if alibi_slopes is not None:
                    slopes = tl.load(alibi_slopes + heads, rows < GROUP, 0.0) * LOG2_E
                logit_scale = scale
                if key_scale is not None:
                    logit_scale = scale * tl.load(key_scale + head)
                first_line = (sequence.to(tl.int64) * num_kv_heads * GROUP + heads) * max_segments
                for segment in range(from_tile // TILES, tl.cdiv(to_tile, TILES)):
                    m, total, acc = attend_segment(
                        q,
                        key_cache,
                        value_cache,
                        block_stride,
                        table,
                        head,
                        tl.maximum(segment * TILES, from_tile),
                        tl.minimum(segment * TILES + TILES, to_tile),
                        first_key,
                        seq_len,
                        tl.cdiv(first_key, KEY_TILE),
                        seq_len // KEY_TILE,
                        positions,
                        slopes,
                        logit_scale,
                        soft_cap,
                        window,
                        KEY_TILE,
                        BLOCK_SIZE,
                        HEAD_SIZE,
                        HEAD_TILE,
                        ROWS,
                        alibi_slopes is not None,
                        HAS_WINDOW,
                        HAS_SOFT_CAP,
                        DOT_TYPE,
                    )
                    lines = first_line + segment
                    tl.store(maxima + lines, m, rows < GROUP)
                    tl.store(totals + lines, total, rows < GROUP)
                    tl.store(sums + (lines * HEAD_SIZE)[:, None] + dims[None, :], acc, inside)
        base += tiles.to(tl.int64) * num_kv_heads
        sequence += 1


@triton.jit
def _border(place, first_tile, tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first tile, from place `place` of a head's tiles on, that begins a segment; or the end of the tiles."""
    inside = tl.minimum(tl.maximum(place, 0), tiles).to(tl.int32)
    border = tl.minimum(tl.cdiv(first_tile + inside, TILES) * TILES, first_tile + tiles)
    return tl.where(place <= 0, first_tile, border)


@triton.jit(do_not_specialize=OF_A_STEP)
def join_kernel(  # type: ignore[no-untyped-def]
    out,
    sums,
    maxima,
    totals,
    seq_lens,
    query_starts,
    value_scale,
    num_kv_heads,
    max_segments,
    out_stride,
    window,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Of one sequence and key/value head: each row's segments from first to last; zeros where there are none."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - token == 1:
        seq_len = tl.load(seq_lens + sequence)
        first_segment = 0
        if HAS_WINDOW:
            first_segment = tl.maximum(seq_len - window, 0) // SEGMENT
        rows, dims = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
        inside = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
        heads = head * GROUP + rows
        m, total = tl.full([GROUP_TILE], float("-inf"), tl.float32), tl.zeros([GROUP_TILE], tl.float32)
        acc = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
        for segment in tl.range(first_segment, tl.cdiv(seq_len, SEGMENT)):
            lines = (sequence.to(tl.int64) * num_kv_heads * GROUP + heads) * max_segments + segment
            next_m = tl.load(maxima + lines, rows < GROUP, float("-inf"))
            next_total = tl.load(totals + lines, rows < GROUP, 0.0)
            next_acc = tl.load(sums + (lines * HEAD_SIZE)[:, None] + dims[None, :], inside, 0.0)
            m, total, acc = join(m, total, acc, next_m, next_total, next_acc)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if value_scale is not None:
            result = result * tl.load(value_scale + head)
        places = token.to(tl.int64) * out_stride + (heads * HEAD_SIZE)[:, None] + dims[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), inside)
