"""Latent attention of a tile of rows over the keys of a span: what a program of either kernel does.

    rows (token, head)   q [ROWS, latent | turned] --- . K^T of a tile of keys ---> logits [ROWS, KEY_TILE]
                                                       acc [ROWS, latent] <--- rescaled, + weights . K[:, :latent]

All heads of a token meet the same keys, and values are the beginning of keys: a tile is read once and multiplied twice.
Rows are pairs of a new token and a head, token by token. Why a row's bits depend on nothing beside it, and what m,
total and acc are: `kernels.gpu.attention.segment`, whose order of sums this keeps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.segment import SEGMENT, SPAN, join, nothing


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def end_of_keys(seq_len, query_len, first_row, HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Behind the last key that some row of the tile sees."""
    return tl.minimum(seq_len - query_len + (first_row + ROWS - 1) // HEADS + 1, seq_len)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def attend_latents(  # type: ignore[no-untyped-def]
    query,
    cache,
    table,
    seq_len,
    query_start,
    query_len,
    first_row,
    first_segment,
    end_segment,
    query_stride,
    block_stride,
    logit_scale,
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
    """(m, total, acc) of rows first_row..first_row + ROWS over the segments first_segment..end_segment, all of a span,
    joined from the first to the last: with JOINS in the loop over tiles, which then runs on, else around it."""
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    rows = first_row + tl.arange(0, ROWS)
    tokens = rows // HEADS
    dims, turned = tl.arange(0, LATENT_TILE)[None, :], tl.arange(0, TURNED_TILE)[None, :]
    is_there = (tokens < query_len)[:, None]
    lines = (query_start + tokens).to(tl.int64) * query_stride + rows % HEADS * (LATENT + TURNED)
    of_rows = query + lines[:, None]
    q_latent = tl.load(of_rows + dims, is_there & (dims < LATENT), 0.0).to(DOT_TYPE)
    q_turned = tl.load(of_rows + LATENT + turned, is_there & (turned < TURNED), 0.0).to(DOT_TYPE)

    context_len = seq_len - query_len
    positions = context_len + tokens
    end_key = end_of_keys(seq_len, query_len, first_row, HEADS, ROWS)
    end_full = (context_len + first_row // HEADS + 1) // KEY_TILE
    all_tiles = tl.cdiv(end_key, KEY_TILE)

    so_far_m, so_far_total, so_far_acc = nothing(ROWS, LATENT_TILE)
    step: tl.constexpr = SPAN if JOINS else 1
    for segment in tl.range(first_segment, end_segment, step, disable_licm=True):
        m, total, acc = nothing(ROWS, LATENT_TILE)
        begin_tile, end_tile = segment * TILES, tl.minimum(tl.minimum(segment + step, end_segment) * TILES, all_tiles)
        # Blocks are read one tile ahead of keys, which are copied two tiles ahead of the products.
        keys = begin_tile * KEY_TILE + tl.arange(0, KEY_TILE)
        blocks = tl.load(table + keys // BLOCK_SIZE, keys < end_key, 0)
        for tile in tl.range(begin_tile, end_tile, disable_licm=True):
            if JOINS and tile // TILES * TILES == tile:
                so_far_m, so_far_total, so_far_acc = join(so_far_m, so_far_total, so_far_acc, m, total, acc)
                m, total, acc = nothing(ROWS, LATENT_TILE)
            keys = tile * KEY_TILE + tl.arange(0, KEY_TILE)
            needed = (keys < end_key)[:, None]
            elements = blocks.to(tl.int64) * block_stride + keys % BLOCK_SIZE * (LATENT + TURNED)
            of_keys = cache + elements[:, None]
            k_latent = tl.load(of_keys + dims, needed & (dims < LATENT), 0.0).to(DOT_TYPE)
            k_turned = tl.load(of_keys + LATENT + turned, needed & (turned < TURNED), 0.0).to(DOT_TYPE)
            next_keys = keys + KEY_TILE
            blocks = tl.load(table + next_keys // BLOCK_SIZE, next_keys < end_key, 0)

            logits = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
            logits = tl.dot(q_turned, tl.trans(k_turned), logits, input_precision="ieee")
            if tile >= end_full:
                logits = tl.where(keys[None, :] <= positions[:, None], logits, float("-inf"))
            new_m = tl.maximum(m, tl.max(logits, 1) * logit_scale)
            # Of a row that has seen nothing yet any finite number, so that no infinity is taken from itself.
            top = tl.where(new_m == float("-inf"), 0.0, new_m)
            weights = tl.exp2(tl.fma(logits, tl.zeros_like(logits) + logit_scale, tl.zeros_like(logits) - top[:, None]))
            decay = tl.exp2(m - top)
            total = tl.fma(total, decay, tl.sum(weights, 1))
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(DOT_TYPE), k_latent, acc, input_precision="ieee")
            m = new_m
        so_far_m, so_far_total, so_far_acc = join(so_far_m, so_far_total, so_far_acc, m, total, acc)
    return so_far_m, so_far_total, so_far_acc
