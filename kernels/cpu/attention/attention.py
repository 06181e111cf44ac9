"""Paged attention on a CPU: formula and arguments as in `kernels.oracles.reference.paged_attention`.

Source: Kwon et al. 2023 (arXiv:2309.06180) for the paged cache; Milakov and Gimelshein 2018 (arXiv:1805.02867) for the
softmax that is computed tile by tile with a running maximum `m` and sum `l`.

A work item is a tile of query tokens (`attention_tiles`) and a key/value head; the query heads of the group make the
tile's rows (`attention_item`):

    rows [tokens x group]  q -------- . K^T of 64 keys ---> scores [rows, 64] --- softmax, running m, l ---> p
                                                            acc [rows, head] <--- rescaled, + p . V of 64 keys

Sequences that begin with the same blocks, as prefix caching makes them, are decoded together as far as these go: a
common prefix is read once for 16 of them. 64 sequences with 512 keys in common and 32 of their own, one layer, one Zen
5 core: 3.4 ms each for itself, 1.0 ms so.

A decode row's keys go from the cache straight into registers (`attention_registers`). Blocks lie anywhere, so the
processor does not see the next ones coming: they are prefetched a few at a time while the last are worked on. 32 decode
rows of 200 tokens, one layer on one core: 0.24 ms out of the third cache level and 0.52 out of memory, which two cores
read in 0.34.

Where threads outnumber the items, or would not finish them together, some items are cut (`attention_split`).

Every row's sums run in one order: over the head's elements, over key tiles that start at multiples of 64, over their
keys. Masked keys add exact zeros. So a row's result does not depend on the rows beside it, nor on whether its token is
computed alone, within a prompt, within a chunk or over a shared prefix: bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kernels.cpu.attention.attention_item import attend
from kernels.cpu.attention.attention_split import attend_split, is_split_better
from kernels.cpu.attention.attention_tiles import COUNT, SEQUENCE, cut
from kernels.cpu.runtime import num_threads
from kernels.cpu.shared_work import counters, shared
from kernels.cpu.vectors.numbers import FLOAT32, INT32, element_of, lines, stored_element_of

# Pairs of a query head's token and a key that the calling thread computes alone. One sequence of 9 heads over 3, keys
# and values in memory, the other of two Zen 5 cores just through with a product: 16 keys take 6.1 us alone and 5.6 so,
# 64 take 8.8 and 8.5, 128 take 15.8 and 13.0.
FEW_PAIRS = 150

_attend_all = shared(attend)


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
    """See `kernels.oracles.reference.paged_attention`. `out` may be strided in its first dimension.

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
    block_tables = lines(tables_address, INT32, num_sequences, tables_stride)
    seq_lens = lines(seq_lens_address, INT32, 1, num_sequences)[0]
    query_starts = lines(query_starts_address, INT32, 1, num_sequences + 1)[0]
    out = lines(out_address, element, query_starts[num_sequences], out_stride)
    query = lines(query_address, element, query_starts[num_sequences], query_stride)
    cache_size = num_blocks * num_kv_heads * block_size * head_size
    key_cache = lines(key_address, stored_element, 1, cache_size)[0]
    value_cache = lines(value_address, stored_element, 1, cache_size)[0]
    slopes = lines(slopes_address, FLOAT32, 1, num_heads if slopes_address != 0 else 0)[0]
    tiles = cut(block_tables, seq_lens, query_starts, block_size, window)
    num_items, group = tiles.shape[0] * num_kv_heads, num_heads // num_kv_heads
    layout = num_kv_heads, block_size, head_size
    if is_split_better(tiles, key_cache, layout, group, seq_lens, query_starts, window, num_threads):
        cache = key_cache, value_cache, layout, group, block_tables
        attend_split(num_threads, tiles, out, query, *cache, seq_lens, query_starts, slopes, scale, window, cap)
        return
    threads = min(num_threads, num_items)
    if threads == 1 or _num_pairs(tiles, seq_lens) * num_heads <= FEW_PAIRS:
        cache = key_cache, value_cache, layout, group, block_tables
        for item in range(num_items):
            attend(item, num_items, tiles, out, query, *cache, seq_lens, query_starts, slopes, scale, window, cap)
        return
    counts = counters(threads, 1)
    for thread in prange(threads):
        # Put together in here: a loop's threads are handed arrays and numbers, no tuples.
        cache = key_cache, value_cache, (num_kv_heads, block_size, head_size), group, block_tables
        rest = seq_lens, query_starts, slopes, scale, window, cap
        _attend_all((counts, np.int64(thread), threads), 0, num_items, (tiles, out, query, *cache, *rest))


@njit(nogil=True)
def _num_pairs(tiles, seq_lens):  # type: ignore[no-untyped-def]
    """How many pairs of a query token and a key there are, at most."""
    pairs = 0
    for tile in tiles:
        pairs += tile[COUNT] * seq_lens[tile[SEQUENCE]]
    return pairs
