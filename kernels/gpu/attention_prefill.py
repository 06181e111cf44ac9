r"""Paged attention of sequences with several new tokens: tiles of rows, each over all keys that it sees.

    rows (token, head of the group)    segment 0        segment 1        segment 2
    tile 2, the heaviest, first:   |################|################|########\
    tile 1                         |################|########\         # every row sees all keys of these tiles
    tile 0                         |########\                          \ compared with positions, masked

A program takes tiles in turns with all others, there and back: heaviest first, and who was served last in one round is
first in the next, which evens out that later tiles see more keys. The results of segments are joined from first to
last, as the decode kernel's are: it does not matter which of the two computes a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention_segment import LOG2_E, SEGMENT, attend_segment, join
from kernels.gpu.attention_work import CHUNK, OF_A_STEP, prefill_tiles


@triton.jit(do_not_specialize=OF_A_STEP)
def prefill_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_starts,
    alibi_slopes,
    key_scale,
    value_scale,
    num_sequences,
    num_kv_heads,
    out_stride,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """One program a tile of rows and key head; writes `out` itself."""
    num_tiles = 0
    for chunk in range(0, num_sequences, CHUNK):
        num_tiles += tl.sum(
            prefill_tiles(chunk + tl.arange(0, CHUNK), num_sequences, query_starts, GROUP, ROWS),
        )
    num_items = num_tiles * num_kv_heads
    me, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(0, num_items, programs, disable_licm=True):
        item = first + tl.where(first // programs % 2 == 0, me, programs - 1 - me)
        if item < num_items:
            head = item % num_kv_heads
            place = num_tiles - 1 - item // num_kv_heads
            sequence, tiles_before, end = tl.zeros([], tl.int32), 0, 0
            for chunk in range(0, num_sequences, CHUNK):
                tiles = prefill_tiles(chunk + tl.arange(0, CHUNK), num_sequences, query_starts, GROUP, ROWS)
                is_before = end + tl.cumsum(tiles) <= place
                sequence += tl.sum(is_before.to(tl.int32))
                tiles_before += tl.sum(tl.where(is_before, tiles, 0))
                end += tl.sum(tiles)
            _attend_rows(
                out,
                query,
                key_cache,
                value_cache,
                block_tables + sequence.to(tl.int64) * table_stride,
                tl.load(seq_lens + sequence),
                tl.load(query_starts + sequence),
                tl.load(query_starts + sequence + 1),
                alibi_slopes,
                key_scale,
                value_scale,
                head,
                (place - tiles_before) * ROWS,
                out_stride,
                query_stride,
                block_stride,
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
                DOT_TYPE,
            )


@triton.jit
def _attend_rows(  # type: ignore[no-untyped-def]
    out,
    query,
    key_cache,
    value_cache,
    table,
    seq_len,
    query_start,
    query_end,
    alibi_slopes,
    key_scale,
    value_scale,
    head,
    first_row,
    out_stride,
    query_stride,
    block_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Rows first_row..first_row + ROWS of one sequence and key/value head, from their queries to `out`."""
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    query_len = query_end - query_start
    context_len = seq_len - query_len
    rows = first_row + tl.arange(0, ROWS)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_TILE)
    inside = (tokens < query_len)[:, None] & (dims < HEAD_SIZE)[None, :]
    places = (heads * HEAD_SIZE)[:, None] + dims[None, :]
    lines = (query_start + tokens).to(tl.int64)
    q = tl.load(query + (lines * query_stride)[:, None] + places, inside, 0.0).to(DOT_TYPE)

    positions = context_len + tokens
    first_position = context_len + first_row // GROUP
    last_position = tl.minimum(context_len + (first_row + ROWS - 1) // GROUP, seq_len - 1)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
    first_tile, last_tile = first_key // KEY_TILE, tl.cdiv(last_position + 1, KEY_TILE)
    first_full, end_full = 0, (first_position + 1) // KEY_TILE
    if HAS_WINDOW:
        first_full = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEY_TILE)

    slopes = tl.zeros([ROWS], tl.float32)
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads) * LOG2_E
    logit_scale = scale
    if key_scale is not None:
        logit_scale = scale * tl.load(key_scale + head)

    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_TILE], tl.float32)
    for segment in tl.range(first_tile // TILES, tl.cdiv(last_tile, TILES), disable_licm=True):
        next_m, next_total, next_acc = attend_segment(
            q,
            key_cache,
            value_cache,
            block_stride,
            table,
            head,
            tl.maximum(segment * TILES, first_tile),
            tl.minimum(segment * TILES + TILES, last_tile),
            first_key,
            last_position + 1,
            first_full,
            end_full,
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
        m, total, acc = join(m, total, acc, next_m, next_total, next_acc)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale is not None:
        result = result * tl.load(value_scale + head)
    tl.store(out + (lines * out_stride)[:, None] + places, result.to(out.dtype.element_ty), inside)
