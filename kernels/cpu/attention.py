"""Paged attention on a CPU: formula and arguments as in `kernels.reference.paged_attention`.

Source: Kwon et al. 2023 (arXiv:2309.06180) for the paged cache; Milakov and Gimelshein 2018 (arXiv:1805.02867) for the
softmax that is computed tile by tile with a running maximum `m` and sum `l`.

A work item is (sequence, tile of its new tokens, key/value head); the query heads of the group make the tile's rows:

    rows [tokens x group]  q -------- . K^T of 64 keys ---> scores [rows, 64] --- softmax, running m, l ---> p
                                                            acc [rows, head] <--- rescaled, + p . V of 64 keys

Keys and values come out of the cache into scratch that fits the first cache levels, 64 at a time, as float32, head size
padded to whole vectors. Nothing else is gathered. Blocks lie anywhere, so the processor does not see the next ones
coming: they are asked for line by line while the last are copied. 32 decode rows of 200 tokens out of memory, Zen 5:
1.20 ms without that, 0.83 with it on one thread; 0.67 and 0.46 on two; asked for all at once, 1.00 on one.

Decode is the same code with one token a tile. Beside torch's scaled_dot_product_attention over tokens gathered for it
before, on one core: 1,500 tokens of prompt 22 ms to 36, 256 after 4,000 others 21 to 29.

Every row's sums run in one order: over the head's elements, over key tiles that start at multiples of 64, over their
keys. Masked keys add exact zeros. So a row's result does not depend on the rows beside it, nor on whether its token is
computed alone, within a prompt or within a chunk: bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.numbers import FLOAT32, INT32, element_of, exp, from_float32, lines, stored_element_of, to_float32
from kernels.cpu.registers import LANES, matmul_add, prefetch, transpose
from kernels.cpu.runtime import num_threads

KEY_TILE = 64  # keys whose scores make one register block of 4 vectors
ROW_BLOCK = 4  # rows multiplied at once: 4 x 4 accumulators, 4 vectors of keys, of 32 registers
# Tokens of a prefill that share a tile of keys. One layer of 1,500 tokens, 9 heads over 3, on one Zen 5 core: 28.6 ms
# with 8, 24.1 with 16, 21.9 with 32, 20.8 with 64; more leaves short prompts too few items for the threads.
QUERY_TILE = 32
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


@njit(nogil=True)
def _item(item, num_kv_heads, tile_starts, query_starts, seq_lens):  # type: ignore[no-untyped-def]
    """Work item `item`: its sequence, key/value head, first row of `query`, number of tokens, first one's position."""
    tile, kv_head = item // num_kv_heads, item % num_kv_heads
    s = np.searchsorted(tile_starts, tile, side="right") - 1
    first = (tile - tile_starts[s]) * QUERY_TILE
    query_len = query_starts[s + 1] - query_starts[s]
    return s, kv_head, query_starts[s] + first, min(QUERY_TILE, query_len - first), seq_lens[s] - query_len + first


@njit(nogil=True)
def _first_key(position, window):  # type: ignore[no-untyped-def]
    """Where the key tiles of an item start whose first token has this position."""
    return max(0, position + 1 - window) // KEY_TILE * KEY_TILE if window > 0 else 0


@njit(nogil=True)
def _line(block_table, num_kv_heads, block_size, kv_head, position):  # type: ignore[no-untyped-def]
    """The cache's line that holds a position of a sequence."""
    return (block_table[position // block_size] * num_kv_heads + kv_head) * block_size + position % block_size


@njit(nogil=True)
def _widen(line, place, count):  # type: ignore[no-untyped-def]
    # Slices instead of offsets: with them LLVM knows that no index is negative, and vectorises (5 times faster).
    for d in range(count):
        place[d] = to_float32(line[d])


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
    group = num_heads // num_kv_heads
    padded = (head_size + LANES - 1) // LANES * LANES
    block_tables = lines(tables_address, INT32, num_sequences, tables_stride)
    seq_lens = lines(seq_lens_address, INT32, 1, num_sequences)[0]
    query_starts = lines(query_starts_address, INT32, 1, num_sequences + 1)[0]
    out = lines(out_address, element, query_starts[num_sequences], out_stride)
    query = lines(query_address, element, query_starts[num_sequences], query_stride)
    key_cache = lines(key_address, stored_element, num_blocks * num_kv_heads * block_size, head_size)
    value_cache = lines(value_address, stored_element, num_blocks * num_kv_heads * block_size, head_size)
    slopes = lines(slopes_address, FLOAT32, 1, num_heads)[0]
    biased = slopes_address != 0

    tile_starts = np.zeros(num_sequences + 1, dtype=np.int64)
    for s in range(num_sequences):
        tile_starts[s + 1] = tile_starts[s] + (query_starts[s + 1] - query_starts[s] + QUERY_TILE - 1) // QUERY_TILE
    num_items = tile_starts[num_sequences] * num_kv_heads
    lanes = min(num_threads, num_items)

    for lane in prange(lanes):
        rows_most = min(QUERY_TILE, query.shape[0]) * group
        q = np.zeros(rows_most * padded, dtype=np.float32)
        acc = np.empty(rows_most * padded, dtype=np.float32)
        maxima = np.empty(rows_most, dtype=np.float32)
        sums = np.empty(rows_most, dtype=np.float32)
        keys = np.zeros(KEY_TILE * padded, dtype=np.float32)
        values = np.zeros(KEY_TILE * padded, dtype=np.float32)
        keys_t = np.zeros(padded * KEY_TILE, dtype=np.float32)
        scores = np.empty(ROW_BLOCK * KEY_TILE, dtype=np.float32)
        # Items go round the threads: in a causal prefill later tiles cost more than earlier ones.
        for item in range(lane, num_items, lanes):
            s, kv_head, token, count, position = _item(item, num_kv_heads, tile_starts, query_starts, seq_lens)
            rows = count * group
            for row in range(rows):
                head = kv_head * group + row % group
                line = query[token + row // group, head * head_size : (head + 1) * head_size]
                place = q[row * padded : (row + 1) * padded]
                for d in range(head_size):
                    place[d] = to_float32(line[d]) * scale
            acc[: rows * padded] = np.float32(0.0)
            maxima[:rows] = HIDDEN
            sums[:rows] = np.float32(0.0)

            end = position + count  # no row of the tile sees a key from here on
            for key in range(_first_key(position, window), end, KEY_TILE):
                num_keys = min(KEY_TILE, end - key)
                # Which keys come after these: of this item, or the first of the thread's next.
                if key + KEY_TILE < end:
                    next_s, next_head, next_key, next_end = s, kv_head, key + KEY_TILE, end
                elif item + lanes < num_items:
                    next_s, next_head, _, next_count, next_position = _item(
                        item + lanes, num_kv_heads, tile_starts, query_starts, seq_lens
                    )
                    next_key, next_end = _first_key(next_position, window), next_position + next_count
                else:
                    next_s, next_head, next_key, next_end = s, kv_head, end, end
                for i in range(KEY_TILE):
                    if next_key + i < next_end:
                        line = _line(block_tables[next_s], num_kv_heads, block_size, next_head, next_key + i)
                        prefetch(key_cache[line])
                        prefetch(value_cache[line])
                    if i < num_keys:
                        line = _line(block_tables[s], num_kv_heads, block_size, kv_head, key + i)
                        _widen(key_cache[line], keys[i * padded : (i + 1) * padded], head_size)
                        _widen(value_cache[line], values[i * padded : (i + 1) * padded], head_size)
                for j in range(0, num_keys, LANES):
                    for d in range(0, padded, LANES):
                        transpose(keys, j * padded + d, padded, keys_t, d * KEY_TILE + j, KEY_TILE)

                for row in range(0, rows, ROW_BLOCK):
                    block_rows = min(ROW_BLOCK, rows - row)
                    if position + (row + block_rows - 1) // group < key:
                        continue
                    scores[:] = np.float32(0.0)
                    matmul_add(
                        block_rows, q, row * padded, padded, keys_t, KEY_TILE, scores, 0, KEY_TILE, head_size, KEY_TILE
                    )
                    for r in range(block_rows):
                        own = position + (row + r) // group
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
                    matmul_add(
                        block_rows, scores, 0, KEY_TILE, values, padded, acc, row * padded, padded, num_keys, padded
                    )

            for row in range(rows):
                head = kv_head * group + row % group
                line = out[token + row // group, head * head_size : (head + 1) * head_size]
                weighted, share = acc[row * padded : (row + 1) * padded], np.float32(1.0) / sums[row]
                for d in range(head_size):
                    line[d] = from_float32(weighted[d] * share, line[d])
