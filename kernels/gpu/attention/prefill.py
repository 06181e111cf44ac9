r"""Paged attention of the whole sequences: tiles of rows, each over all keys that it sees.

    rows (token, head of the group)    segment 0        segment 1        segment 2
    tile 2, the heaviest, first:   |################|################|########\
    tile 1                         |################|########\         # every row sees all keys of these tiles
    tile 0                         |########\                          \ compared with positions, masked

A program takes tiles in turns with all others, there and back: heaviest first, and who was served last in one round is
first in the next, which evens out that later tiles see more keys. The results of segments are joined from first to
last within a span, and those of spans likewise, as the split sequences' are: it does not matter which of the two
kernels computes a token. A thread's registers hold the sums of a segment and of a span. Those of the spans before wait
in memory of the program's own, `kept_`, which is read and written once a span:

    kept_sums f32[programs, ROWS, head_size], kept_maxima and kept_totals f32[programs, ROWS]
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.rows import attend_rows, seen_keys
from kernels.gpu.attention.segment import SEGMENT, SPAN, finish, join, nothing
from kernels.gpu.attention.work import OF_A_STEP, WHOLE_END, sequence_of


@triton.jit(do_not_specialize=OF_A_STEP)
def prefill_kernel(  # type: ignore[no-untyped-def]
    out,
    kept_sums,
    kept_maxima,
    kept_totals,
    plan,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_starts,
    alibi_slopes,
    sinks,
    key_scale,
    value_scale,
    num_sequences,
    num_kv_heads,
    out_stride,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    JOINS: tl.constexpr,
    SUMS_ARE_PRODUCTS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Programs take tiles of rows and key/value heads in turn, and write `out`."""
    ends = plan + WHOLE_END * num_sequences
    num_tiles = tl.load(ends + num_sequences - 1)
    num_items = num_tiles * num_kv_heads
    me, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(0, num_items, programs, disable_licm=True):
        item = first + tl.where(first // programs % 2 == 0, me, programs - 1 - me)
        if item < num_items:
            head = item % num_kv_heads
            place = num_tiles - 1 - item // num_kv_heads
            sequence, tiles_before = sequence_of(ends, num_sequences, place, 1)
            first_row = (place - tiles_before.to(tl.int32)) * ROWS
            seq_len, query_start = tl.load(seq_lens + sequence), tl.load(query_starts + sequence)
            query_len = tl.load(query_starts + sequence + 1) - query_start
            first_key, end_key = seen_keys(seq_len, query_len, first_row, window, GROUP, ROWS, HAS_WINDOW)
            first_span, end_span = first_key // (SEGMENT * SPAN), tl.cdiv(end_key, SEGMENT * SPAN)
            m, total, acc = nothing(ROWS, HEAD_TILE)
            for span in tl.range(first_span, end_span, disable_licm=True):
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
                    tl.maximum(first_key // SEGMENT, span * SPAN),
                    tl.minimum(tl.cdiv(end_key, SEGMENT), (span + 1) * SPAN),
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
                if (span > first_span) | (span < end_span - 1):
                    rows, dims = me * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
                    places = (rows * HEAD_SIZE)[:, None] + dims[None, :]
                    has_dim = (dims < HEAD_SIZE)[None, :]
                    if span > first_span:
                        before_m, before_total = tl.load(kept_maxima + rows), tl.load(kept_totals + rows)
                        before_acc = tl.load(kept_sums + places, has_dim, 0.0)
                        m, total, acc = join(before_m, before_total, before_acc, m, total, acc)
                    tl.debug_barrier()  # another thread may still read what is written here
                    tl.store(kept_maxima + rows, m)
                    tl.store(kept_totals + rows, total)
                    tl.store(kept_sums + places, acc, has_dim)
                    tl.debug_barrier()  # another thread may read it
            rows, dims = first_row + tl.arange(0, ROWS), tl.arange(0, HEAD_TILE)
            tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
            result = finish(m, total, acc, sinks, heads, value_scale, head, tokens < query_len)
            places = (query_start + tokens).to(tl.int64) * out_stride + heads * HEAD_SIZE
            inside = (tokens < query_len)[:, None] & (dims < HEAD_SIZE)[None, :]
            tl.store(out + places[:, None] + dims[None, :], result.to(out.dtype.element_ty), inside)
