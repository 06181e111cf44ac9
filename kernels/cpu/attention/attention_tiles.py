"""How the work of paged attention on a CPU is cut: tiles of query tokens, and the keys that each of them meets.

A tile is a row of integers: (first sequence, number of sequences, first row of `query`, number of rows, shared keys).

    one sequence       up to QUERY_TILE of its tokens; they share every tile of keys
    several            the single new tokens of sequences next to each other whose first blocks are the same ones:

        keys   0 ........... shared ........ seq_len
        s      | phase 0: read  |  phase 1  |
        s + 1  | once, by all   |  phase 2      |
        s + 2  | of them        |  phase 3 |

Which tokens share a tile changes what is read from memory, never a result: every row meets its key tiles in order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

KEY_TILE = 64  # keys whose scores make one register block of 4 vectors
RUN = 16  # keys that lie one after the other in the cache, where blocks are multiples of it
# Tokens of a prefill that share a tile of keys. One layer, 9 heads over 3, on one Zen 5 core: 1,500 tokens take 17.9 ms
# with 32 and 17.3 with 64, 14 prompts of 146 tokens 3.4 ms and 3.6; more leaves the threads of short prompts too few.
QUERY_TILE = 32
SHARED_TILE = 16  # sequences over a common prefix; likewise
SEQUENCE, NUM_SEQUENCES, TOKEN, COUNT, SHARED = range(5)  # columns of a tile


@njit(nogil=True)
def _common_keys(table, other, limit, block_size):  # type: ignore[no-untyped-def]
    """How many of the first `limit` keys lie in the same blocks, in whole key tiles."""
    limit, keys = limit // KEY_TILE * KEY_TILE, 0
    while keys < limit and table[keys // block_size] == other[keys // block_size]:
        keys += block_size
    return min(keys, limit) // KEY_TILE * KEY_TILE


@njit(nogil=True)
def cut(block_tables, seq_lens, query_starts, block_size, window):  # type: ignore[no-untyped-def]
    """The tiles of a step, i64[N, 5], in the order of its rows."""
    num_sequences, num_tiles = seq_lens.size, 0
    for s in range(num_sequences):
        num_tiles += (query_starts[s + 1] - query_starts[s] + QUERY_TILE - 1) // QUERY_TILE
    tiles = np.empty((num_tiles, 5), dtype=np.int64)
    num_tiles, s = 0, 0
    while s < num_sequences:
        query_len, members, shared = query_starts[s + 1] - query_starts[s], 1, seq_lens[s]
        # With a window each sequence has a first key of its own.
        while query_len == 1 and window == 0 and members < SHARED_TILE and s + members < num_sequences:
            other = s + members
            if query_starts[other + 1] - query_starts[other] != 1:
                break
            common = _common_keys(block_tables[s], block_tables[other], min(shared, seq_lens[other]), block_size)
            # One more sequence, but not at the price of most of what the others share.
            if common == 0 or (members > 1 and 2 * common < shared):
                break
            members, shared = members + 1, common
        if members > 1:
            query_len = members
        for first in range(0, query_len, QUERY_TILE):
            tiles[num_tiles, SEQUENCE], tiles[num_tiles, NUM_SEQUENCES] = s, members
            tiles[num_tiles, TOKEN] = query_starts[s] + first
            tiles[num_tiles, COUNT] = min(QUERY_TILE, query_len - first)
            tiles[num_tiles, SHARED] = shared if members > 1 else 0
            num_tiles += 1
        s += members
    return tiles[:num_tiles]


@njit(nogil=True)
def position_of(tile, row, seq_lens, query_starts):  # type: ignore[no-untyped-def]
    """The position, within its sequence, of the tile's token number `row`."""
    s = tile[SEQUENCE]
    if tile[NUM_SEQUENCES] > 1:
        return seq_lens[s + row] - 1
    return seq_lens[s] - (query_starts[s + 1] - tile[TOKEN]) + row


@njit(nogil=True)
def keys_of(tile, phase, seq_lens, query_starts, window):  # type: ignore[no-untyped-def]
    """(sequence whose blocks are read, first key, end of the keys) of a phase: 0 for what is shared, then a sequence
    each."""
    s = tile[SEQUENCE]
    if phase == 0:
        return s, 0, tile[SHARED]
    if tile[NUM_SEQUENCES] > 1:
        return s + phase - 1, tile[SHARED], seq_lens[s + phase - 1]
    position = position_of(tile, 0, seq_lens, query_starts)
    first = max(0, position + 1 - window) // KEY_TILE * KEY_TILE if window > 0 else 0
    return s, first, position + tile[COUNT]
