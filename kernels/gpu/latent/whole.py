"""Latent attention of the whole sequences: tiles of rows, each over all keys that it sees.

As `kernels.gpu.attention.prefill`, which draws it: programs take tiles in turns, heaviest first, and keep what they
have added up of earlier spans in memory of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.segment import SEGMENT, SPAN, finish, join, nothing
from kernels.gpu.attention.work import OF_A_STEP, WHOLE_END, sequence_of
from kernels.gpu.latent.rows import attend_latents, end_of_keys


@triton.jit(do_not_specialize=OF_A_STEP)  # type: ignore[untyped-decorator]  # Triton has no types
def whole_kernel(  # type: ignore[no-untyped-def]
    out,
    kept_sums,
    kept_maxima,
    kept_totals,
    plan,
    query,
    cache,
    block_tables,
    seq_lens,
    query_starts,
    num_sequences,
    out_stride,
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
    JOINS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Programs take tiles of rows in turn, and write `out`."""
    ends = plan + WHOLE_END * num_sequences
    num_tiles = tl.load(ends + num_sequences - 1)
    me, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(0, num_tiles, programs, disable_licm=True):
        item = first + tl.where(first // programs % 2 == 0, me, programs - 1 - me)
        if item < num_tiles:
            place = num_tiles - 1 - item
            sequence, tiles_before = sequence_of(ends, num_sequences, place, 1)
            first_row = (place - tiles_before.to(tl.int32)) * ROWS
            seq_len, query_start = tl.load(seq_lens + sequence), tl.load(query_starts + sequence)
            query_len = tl.load(query_starts + sequence + 1) - query_start
            end_key = end_of_keys(seq_len, query_len, first_row, HEADS, ROWS)
            end_span = tl.cdiv(end_key, SEGMENT * SPAN)
            m, total, acc = nothing(ROWS, LATENT_TILE)
            for span in tl.range(0, end_span, disable_licm=True):
                m, total, acc = attend_latents(
                    query,
                    cache,
                    block_tables + sequence.to(tl.int64) * table_stride,
                    seq_len,
                    query_start,
                    query_len,
                    first_row,
                    span * SPAN,
                    tl.minimum(tl.cdiv(end_key, SEGMENT), (span + 1) * SPAN),
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
                if (span > 0) | (span < end_span - 1):
                    rows, dims = me * ROWS + tl.arange(0, ROWS), tl.arange(0, LATENT_TILE)
                    places = (rows * LATENT)[:, None] + dims[None, :]
                    has_dim = (dims < LATENT)[None, :]
                    if span > 0:
                        before_m, before_total = tl.load(kept_maxima + rows), tl.load(kept_totals + rows)
                        before_acc = tl.load(kept_sums + places, has_dim, 0.0)
                        m, total, acc = join(before_m, before_total, before_acc, m, total, acc)
                    tl.debug_barrier()  # another thread may still read what is written here
                    tl.store(kept_maxima + rows, m)
                    tl.store(kept_totals + rows, total)
                    tl.store(kept_sums + places, acc, has_dim)
                    tl.debug_barrier()  # another thread may read it
            rows, dims = first_row + tl.arange(0, ROWS), tl.arange(0, LATENT_TILE)
            tokens, heads = rows // HEADS, rows % HEADS
            result = finish(m, total, acc, None, heads, None, 0, tokens < query_len)
            places = (query_start + tokens).to(tl.int64) * out_stride + heads * LATENT
            inside = (tokens < query_len)[:, None] & (dims < LATENT)[None, :]
            tl.store(out + places[:, None] + dims[None, :], result.to(out.dtype.element_ty), inside)
