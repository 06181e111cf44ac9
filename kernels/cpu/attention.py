"""Paged attention on a CPU: formula and arguments as in `kernels.reference.paged_attention`.

Source: Kwon et al. 2023 (arXiv:2309.06180) for the paged cache; Milakov and Gimelshein 2018 (arXiv:1805.02867) for the
softmax that is computed tile by tile with a running maximum `m` and sum `l`.

A work item is a tile of query tokens (`attention_tiles`) and a key/value head; the query heads of the group make the
tile's rows:

    rows [tokens x group]  q -------- . K^T of 64 keys ---> scores [rows, 64] --- softmax, running m, l ---> p
                                                            acc [rows, head] <--- rescaled, + p . V of 64 keys

Sequences that begin with the same blocks, as prefix caching makes them, are decoded together as far as these go: a
common prefix is read once for 16 of them. 64 sequences with 512 keys in common and 32 of their own, one layer, one Zen
5 core: 3.4 ms each for itself, 1.2 ms so.

Keys are transposed on their way out of the cache into scratch that fits the first cache level, values are read where
they lie, or widened into scratch where many rows share them. 32 decode rows of 200 tokens in the third cache level, one
layer on one core: 0.42 ms, and 0.69 with all lines copied first. Blocks lie anywhere, so the processor does not see the
next ones coming: they are asked for a few at a time while the last are worked on.

Every row's sums run in one order: over the head's elements, over key tiles that start at multiples of 64, over their
keys. Masked keys add exact zeros. So a row's result does not depend on the rows beside it, nor on whether its token is
computed alone, within a prompt, within a chunk or over a shared prefix: bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.attention_tiles import (
    COUNT,
    KEY_TILE,
    NUM_SEQUENCES,
    QUERY_TILE,
    SHARED,
    TOKEN,
    cut,
    keys_of,
    position_of,
)
from kernels.cpu.cache_reads import add_values, aim, ask_for, read_keys, read_values
from kernels.cpu.numbers import FLOAT32, INT32, element_of, exp, from_float32, lines, stored_element_of, to_float32
from kernels.cpu.registers import LANES, matmul_add
from kernels.cpu.runtime import num_threads

ROW_BLOCK = 4  # rows multiplied at once: 4 x 4 accumulators, 4 vectors of keys, of 32 registers
# With so few rows a tile of values is quicker read where it lies than copied; sums are the same.
FEW_ROWS = 8
ASKED = 10  # keys to ask for before each piece of work on a tile: 64 in seven pieces, as many as decode rows have
HIDDEN = np.float32(-1e30)  # a score whose weight is zero beside any other


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int = 0,
    logit_soft_cap: float = 0.0,
) -> None:
    """See `kernels.reference.paged_attention`. `out` may be strided in its first dimension.

    out and query are float32 or bfloat16; the caches are either of them, or float16, whatever is computed in.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    if num_heads % num_kv_heads or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(key_cache.shape)}")
    _paged_attention(
        element_of(out, query),
        stored_element_of(key_cache, value_cache),
        out.data_ptr(),
        out.stride(0),
        query.data_ptr(),
        query.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tuple(key_cache.shape),
        block_tables.data_ptr(),
        block_tables.stride(0),
        seq_lens.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.shape[0],
        num_heads,
        np.float32(scale),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        sliding_window,
        np.float32(logit_soft_cap),
        num_threads(),
    )


@njit(nogil=True, fastmath={"contract"})
def _bias(scores, distance, cap, slope):  # type: ignore[no-untyped-def]
    """Soft cap and ALiBi; `distance` is the first key's position minus the query's."""
    for j in range(KEY_TILE):
        score = scores[j]
        if cap > np.float32(0.0):
            score = cap * np.tanh(score / cap)
        scores[j] = score + slope * np.float32(distance + j)


@njit(nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _largest(scores):  # type: ignore[no-untyped-def]
    largest = HIDDEN
    for j in range(KEY_TILE):
        largest = max(largest, scores[j])
    return largest


@njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _weights(scores, maximum):  # type: ignore[no-untyped-def]
    """Scores to e^(score - maximum) in place; returns their sum."""
    total = np.float32(0.0)
    for j in range(KEY_TILE):
        weight = exp(scores[j] - maximum)
        scores[j] = weight
        total += weight
    return total


@njit(nogil=True)
def _scale(numbers, factor):  # type: ignore[no-untyped-def]
    for d in range(numbers.size):
        numbers[d] *= factor


@njit(nogil=True, parallel=True, cache=True)
def _paged_attention(  # type: ignore[no-untyped-def]
    element,
    stored_element,
    out_address,
    out_stride,
    query_address,
    query_stride,
    key_address,
    value_address,
    cache_shape,
    tables_address,
    tables_stride,
    seq_lens_address,
    query_starts_address,
    num_sequences,
    num_heads,
    scale,
    slopes_address,
    window,
    cap,
    num_threads,
):
    num_blocks, num_kv_heads, block_size, head_size = cache_shape
    layout = num_kv_heads, block_size, head_size
    group = num_heads // num_kv_heads
    padded = (head_size + LANES - 1) // LANES * LANES
    block_tables = lines(tables_address, INT32, num_sequences, tables_stride)
    seq_lens = lines(seq_lens_address, INT32, 1, num_sequences)[0]
    query_starts = lines(query_starts_address, INT32, 1, num_sequences + 1)[0]
    out = lines(out_address, element, query_starts[num_sequences], out_stride)
    query = lines(query_address, element, query_starts[num_sequences], query_stride)
    cache_size = num_blocks * num_kv_heads * block_size * head_size
    key_cache = lines(key_address, stored_element, 1, cache_size)[0]
    value_cache = lines(value_address, stored_element, 1, cache_size)[0]
    slopes = lines(slopes_address, FLOAT32, 1, num_heads)[0]
    biased = slopes_address != 0

    tiles = cut(block_tables, seq_lens, query_starts, block_size, window)
    num_items = tiles.shape[0] * num_kv_heads
    lanes = min(num_threads, num_items)

    for lane in prange(lanes):
        rows_most = min(QUERY_TILE, query.shape[0]) * group
        q = np.zeros(rows_most * padded, dtype=np.float32)
        acc = np.empty(rows_most * padded, dtype=np.float32)
        maxima = np.empty(rows_most, dtype=np.float32)
        sums = np.empty(rows_most, dtype=np.float32)
        positions = np.empty(rows_most, dtype=np.int64)
        values = np.zeros(KEY_TILE * padded, dtype=np.float32)
        keys_t = np.zeros(padded * KEY_TILE, dtype=np.float32)
        scores = np.empty(ROW_BLOCK * KEY_TILE, dtype=np.float32)
        cursor = np.empty(4, dtype=np.int64)
        # Items go round the threads: in a causal prefill later tiles cost more than earlier ones.
        for item in range(lane, num_items, lanes):
            tile, kv_head = tiles[item // num_kv_heads], item % num_kv_heads
            token, members = tile[TOKEN], tile[NUM_SEQUENCES]
            rows = tile[COUNT] * group
            for row in range(rows):
                head = kv_head * group + row % group
                line = query[token + row // group, head * head_size : (head + 1) * head_size]
                place = q[row * padded : (row + 1) * padded]
                for d in range(head_size):
                    place[d] = to_float32(line[d]) * scale
                positions[row] = position_of(tile, row // group, seq_lens, query_starts)
            acc[: rows * padded] = np.float32(0.0)
            maxima[:rows] = HIDDEN
            sums[:rows] = np.float32(0.0)

            for phase in range(0 if tile[SHARED] > 0 else 1, members + 1):
                s, first_key, end_key = keys_of(tile, phase, seq_lens, query_starts, window)
                table, first_row, end_row = block_tables[s], 0, rows
                if phase > 0 and members > 1:
                    first_row, end_row = (phase - 1) * group, phase * group
                is_in_place = end_row - first_row <= FEW_ROWS and padded == head_size
                for key in range(first_key, end_key, KEY_TILE):
                    num_keys = min(KEY_TILE, end_key - key)
                    # Which keys come after these: of this phase, of this item's next, or of the thread's next item.
                    if key + KEY_TILE < end_key:
                        aim(cursor, kv_head, s, key + KEY_TILE, end_key)
                    elif phase < members:
                        next_s, next_key, next_end = keys_of(tile, phase + 1, seq_lens, query_starts, window)
                        aim(cursor, kv_head, next_s, next_key, next_end)
                    elif item + lanes < num_items:
                        other = tiles[(item + lanes) // num_kv_heads]
                        first_phase = 0 if other[SHARED] > 0 else 1
                        next_s, next_key, next_end = keys_of(other, first_phase, seq_lens, query_starts, window)
                        aim(cursor, (item + lanes) % num_kv_heads, next_s, next_key, next_end)
                    else:
                        aim(cursor, kv_head, s, 0, 0)
                    ask_for(ASKED, cursor, key_cache, value_cache, block_tables, layout)
                    # The scratch of values serves the keys first.
                    read_keys(key_cache, table, layout, kv_head, key, num_keys, values, keys_t)
                    if not is_in_place:
                        ask_for(ASKED, cursor, key_cache, value_cache, block_tables, layout)
                        read_values(value_cache, table, layout, kv_head, key, num_keys, values)
                    for row in range(first_row, end_row, ROW_BLOCK):
                        block_rows = min(ROW_BLOCK, end_row - row)
                        if positions[row + block_rows - 1] < key:
                            continue
                        scores[:] = np.float32(0.0)
                        ask_for(ASKED, cursor, key_cache, value_cache, block_tables, layout)
                        matmul_add(
                            block_rows,
                            q,
                            row * padded,
                            padded,
                            keys_t,
                            0,
                            KEY_TILE,
                            scores,
                            0,
                            KEY_TILE,
                            head_size,
                            KEY_TILE,
                        )
                        for r in range(block_rows):
                            ask_for(ASKED, cursor, key_cache, value_cache, block_tables, layout)
                            own = positions[row + r]
                            tile_scores = scores[r * KEY_TILE : (r + 1) * KEY_TILE]
                            if cap > np.float32(0.0) or biased:
                                slope = slopes[kv_head * group + (row + r) % group] if biased else np.float32(0.0)
                                _bias(tile_scores, key - own, cap, slope)
                            visible_start = max(0, own + 1 - window - key) if window > 0 else 0
                            visible_end = max(0, min(KEY_TILE, own + 1 - key))
                            if visible_start > 0 or visible_end < KEY_TILE:
                                if visible_start >= visible_end:
                                    tile_scores[:] = np.float32(0.0)
                                    continue
                                tile_scores[:visible_start] = HIDDEN
                                tile_scores[visible_end:] = HIDDEN
                            maximum = max(maxima[row + r], _largest(tile_scores))
                            shrink = exp(maxima[row + r] - maximum)
                            sums[row + r] = sums[row + r] * shrink + _weights(tile_scores, maximum)
                            if shrink != np.float32(1.0):
                                _scale(acc[(row + r) * padded : (row + r + 1) * padded], shrink)
                            maxima[row + r] = maximum
                        ask_for(ASKED, cursor, key_cache, value_cache, block_tables, layout)
                        if is_in_place:
                            place = row * padded
                            add_values(
                                block_rows, scores, value_cache, table, layout, kv_head, key, num_keys, acc, place
                            )
                        else:
                            matmul_add(
                                block_rows,
                                scores,
                                0,
                                KEY_TILE,
                                values,
                                0,
                                padded,
                                acc,
                                row * padded,
                                padded,
                                num_keys,
                                padded,
                            )

            for row in range(rows):
                head = kv_head * group + row % group
                line = out[token + row // group, head * head_size : (head + 1) * head_size]
                weighted, share = acc[row * padded : (row + 1) * padded], np.float32(1.0) / sums[row]
                for d in range(head_size):
                    line[d] = from_float32(weighted[d] * share, line[d])
