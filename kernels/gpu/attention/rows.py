"""Paged attention of a tile of rows: what a program of either kernel does for one sequence and key/value head.

Rows are pairs of a new token and a query head of the group, token by token; a tile has a fixed number of them, and the
last tile of a sequence, or the only one, is partly empty. Which keys a tile sees follows from its first and its last
token; which of these a row sees, from the row's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.segment import LOG2_E, SEGMENT, SPAN, attend_tiles, nothing


@triton.jit
def seen_keys(  # type: ignore[no-untyped-def]
    seq_len, query_len, first_row, window, GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """(first, end) of the keys that some row of the tile sees."""
    context_len = seq_len - query_len
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context_len + first_row // GROUP - window + 1, 0)
    return first, tl.minimum(context_len + (first_row + ROWS - 1) // GROUP + 1, seq_len)


@triton.jit
def attend_rows(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    table,
    seq_len,
    query_start,
    query_len,
    alibi_slopes,
    key_scale,
    head,
    first_row,
    first_segment,
    end_segment,
    query_stride,
    block_lines,
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
    JOINS: tl.constexpr,
    SUMS_ARE_PRODUCTS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """(m, total, acc) of rows first_row..first_row + ROWS over the segments first_segment..end_segment, all of a span,
    joined from the first to the last."""
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    rows = first_row + tl.arange(0, ROWS)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_TILE)
    inside = (tokens < query_len)[:, None] & (dims < HEAD_SIZE)[None, :]
    lines = (query_start + tokens).to(tl.int64) * query_stride + heads * HEAD_SIZE
    q = tl.load(query + lines[:, None] + dims[None, :], inside, 0.0).to(DOT_TYPE)

    context_len = seq_len - query_len
    positions, first_position = context_len + tokens, context_len + first_row // GROUP
    first_key, end_key = seen_keys(seq_len, query_len, first_row, window, GROUP, ROWS, HAS_WINDOW)
    first_tile, end_tile = first_key // KEY_TILE, tl.cdiv(end_key, KEY_TILE)
    first_full, end_full = 0, (first_position + 1) // KEY_TILE
    if HAS_WINDOW:
        first_full = tl.cdiv(tl.maximum(end_key - window, 0), KEY_TILE)

    slopes = tl.zeros([ROWS], tl.float32)
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads) * LOG2_E
    logit_scale = scale
    if key_scale is not None:
        logit_scale = scale * tl.load(key_scale + head)

    m, total, acc = nothing(ROWS, HEAD_TILE)
    step: tl.constexpr = SPAN if JOINS else 1
    for segment in tl.range(first_segment, end_segment, step, disable_licm=True):
        m, total, acc = attend_tiles(
            m,
            total,
            acc,
            q,
            key_cache,
            value_cache,
            block_lines,
            table,
            head,
            tl.maximum(segment * TILES, first_tile),
            tl.minimum(tl.minimum(segment + step, end_segment) * TILES, end_tile),
            first_key,
            end_key,
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
            JOINS,
            SUMS_ARE_PRODUCTS,
            DOT_TYPE,
        )
    return m, total, acc
