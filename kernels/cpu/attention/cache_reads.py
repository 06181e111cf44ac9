"""How a tile of 64 keys and values comes out of a paged cache [num_blocks, num_kv_heads, block_size, head_size].

`layout` is (num_kv_heads, block_size, head_size), `tables` the blocks of all sequences, `cache` the whole of it as flat
elements of any stored type; `padded` the head size in whole vectors. Nothing past the last key of a sequence is
multiplied: what lies there is unknown.

Where blocks are multiples of 16 keys, a tile is four runs of 16 that lie one after the other, and is used in place.
Else its lines are copied to scratch, which is float32.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu.attention.attention_tiles import KEY_TILE, RUN
from kernels.cpu.vectors.float_tile import prefetch_line, transpose_tile
from kernels.cpu.vectors.numbers import to_float32
from kernels.cpu.vectors.vector_code import LANES

NUM_RUNS = KEY_TILE // RUN
PIECES = 2 * NUM_RUNS  # in which a tile is prefetched
# Where a tile lies is `runs`, i64[RUNS_SIZE]: the element at which each run begins, then which keys they are, KEY : END
# of a sequence and one head. A cursor of `cache_prefetch` is another thing: it moves on through a thread's share of all
# blocks, line by line, while products compute.
HEAD, SEQUENCE, KEY, END = range(NUM_RUNS, NUM_RUNS + 4)
RUNS_SIZE = NUM_RUNS + 4


@njit(nogil=True)
def _start(table, layout, kv_head, key):  # type: ignore[no-untyped-def]
    """Where in the cache the elements of a key of a sequence begin."""
    num_kv_heads, block_size, head_size = layout
    return ((table[key // block_size] * num_kv_heads + kv_head) * block_size + key % block_size) * head_size


@njit(nogil=True)
def find_runs(runs, kv_head, sequence, key, end, tables, layout):  # type: ignore[no-untyped-def]
    """Fill `runs` for the tile of keys that starts at `key`, of those before `end`; a sequence is a row of `tables`."""
    num_kv_heads, block_size, head_size = layout
    runs[HEAD], runs[SEQUENCE], runs[KEY], runs[END] = kv_head, sequence, key, min(end, key + KEY_TILE)
    block = key // block_size  # once: runs are counted on, as a division takes as long as reading a key
    place = key - block * block_size
    for run in range((runs[END] - key + RUN - 1) // RUN):
        runs[run] = ((tables[sequence, block] * num_kv_heads + kv_head) * block_size + place) * head_size
        place += RUN
        while place >= block_size:
            place, block = place - block_size, block + 1


@njit(nogil=True)
def prefetch_piece(piece, runs, keys, values, head_size):  # type: ignore[no-untyped-def]
    """Prefetch one of the tile's PIECES, keys and values of half a run; returns the next piece's number.

    A few lines between each two steps of work: a tile's 512 prefetched at once fill the queues, and nothing goes on.
    Where a run lies in several blocks some are prefetched in vain.
    """
    run, first = piece // 2, piece % 2 * (RUN // 2)
    num_keys = min(runs[END] - runs[KEY] - run * RUN - first, RUN // 2)
    if piece < PIECES and num_keys > 0:
        start, end = runs[run] + first * head_size, runs[run] + (first + num_keys) * head_size
        prefetch_line(keys[start:end])
        prefetch_line(values[start:end])
    return piece + 1


@njit(nogil=True)
def _widen(line, place, count):  # type: ignore[no-untyped-def]
    # Slices instead of offsets: with them LLVM knows that no index is negative, and vectorises (5 times faster).
    for d in range(count):
        place[d] = to_float32(line[d])


@njit(nogil=True)
def read_keys(cache, runs, tables, layout, lines, keys_t):  # type: ignore[no-untyped-def]
    """keys_t [padded, 64], the tile's keys transposed; `lines` [64, padded] is overwritten."""
    _, block_size, head_size = layout
    padded = keys_t.size // KEY_TILE
    is_in_place = head_size == padded and block_size % RUN == 0
    if not is_in_place:
        read_values(cache, runs, tables, layout, lines)
    for run in range((runs[END] - runs[KEY] + RUN - 1) // RUN):
        for d in range(0, padded, LANES):
            place = d * KEY_TILE + run * RUN
            if is_in_place:
                transpose_tile(cache, runs[run] + d, padded, keys_t, place, KEY_TILE)
            else:
                transpose_tile(lines, run * RUN * padded + d, padded, keys_t, place, KEY_TILE)


@njit(nogil=True)
def read_values(cache, runs, tables, layout, values):  # type: ignore[no-untyped-def]
    """values [64, padded], the tile's lines one after the other."""
    head_size, padded = layout[2], values.size // KEY_TILE
    for j in range(runs[END] - runs[KEY]):
        start = _start(tables[runs[SEQUENCE]], layout, runs[HEAD], runs[KEY] + j)
        _widen(cache[start : start + head_size], values[j * padded : (j + 1) * padded], head_size)
