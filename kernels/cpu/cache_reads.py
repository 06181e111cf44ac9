"""How a tile of 64 keys and values comes out of a paged cache [num_blocks, num_kv_heads, block_size, head_size].

`layout` is (num_kv_heads, block_size, head_size); `cache` the whole of it as flat elements of any stored type; `padded`
the head size in whole vectors. Scratch is float32. Nothing past the last key of a sequence is multiplied: what lies
there is unknown.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu.attention_tiles import KEY_TILE
from kernels.cpu.numbers import to_float32
from kernels.cpu.registers import LANES, matmul_add, prefetch, transpose

HEAD, KEY, END, SEQUENCE = range(4)  # of a cursor over keys to ask for


@njit(nogil=True)
def _start(table, layout, kv_head, key):  # type: ignore[no-untyped-def]
    """Where in the cache the elements of a key of a sequence begin."""
    num_kv_heads, block_size, head_size = layout
    return ((table[key // block_size] * num_kv_heads + kv_head) * block_size + key % block_size) * head_size


@njit(nogil=True)
def _widen(line, place, count):  # type: ignore[no-untyped-def]
    # Slices instead of offsets: with them LLVM knows that no index is negative, and vectorises (5 times faster).
    for d in range(count):
        place[d] = to_float32(line[d])


@njit(nogil=True)
def aim(cursor, kv_head, sequence, key, end):  # type: ignore[no-untyped-def]
    """Point a cursor, i64[4], at the tile of keys that starts at `key`, of those before `end`."""
    cursor[HEAD], cursor[SEQUENCE], cursor[KEY], cursor[END] = kv_head, sequence, key, min(end, key + KEY_TILE)


@njit(nogil=True)
def ask_for(count, cursor, keys, values, tables, layout):  # type: ignore[no-untyped-def]
    """Prefetch the next `count` keys and values of the cursor, which moves on.

    A few between each two pieces of work: a tile's 512 lines asked for at once fill the queues, and nothing goes on.
    """
    for key in range(cursor[KEY], min(cursor[KEY] + count, cursor[END])):
        start = _start(tables[cursor[SEQUENCE]], layout, cursor[HEAD], key)
        prefetch(keys[start : start + layout[2]])
        prefetch(values[start : start + layout[2]])
    cursor[KEY] += count


@njit(nogil=True)
def read_keys(cache, table, layout, kv_head, key, num_keys, lines, keys_t):  # type: ignore[no-untyped-def]
    """keys_t [padded, 64], the transposed keys `key : key + num_keys`; `lines` [64, padded] is overwritten."""
    _, block_size, head_size = layout
    padded = keys_t.size // KEY_TILE
    if head_size == padded and block_size % LANES == 0:  # 16 keys in a row lie in one block
        for j in range(0, num_keys, LANES):
            start = _start(table, layout, kv_head, key + j)
            for d in range(0, padded, LANES):
                transpose(cache, start + d, padded, keys_t, d * KEY_TILE + j, KEY_TILE)
        return
    read_values(cache, table, layout, kv_head, key, num_keys, lines)
    for j in range(0, num_keys, LANES):
        for d in range(0, padded, LANES):
            transpose(lines, j * padded + d, padded, keys_t, d * KEY_TILE + j, KEY_TILE)


@njit(nogil=True)
def read_values(cache, table, layout, kv_head, key, num_keys, values):  # type: ignore[no-untyped-def]
    """values [64, padded], line after line."""
    padded = values.size // KEY_TILE
    for j in range(num_keys):
        start = _start(table, layout, kv_head, key + j)
        _widen(cache[start : start + layout[2]], values[j * padded : (j + 1) * padded], layout[2])


@njit(nogil=True)
def add_values(rows, weights, cache, table, layout, kv_head, key, num_keys, acc, acc_offset):  # type: ignore[no-untyped-def]
    """acc[rows, head_size] += weights[rows, 64] . values, which are read where they lie, block after block."""
    _, block_size, head_size = layout
    j = 0
    while j < num_keys:
        start = _start(table, layout, kv_head, key + j)
        depth = min(block_size - (key + j) % block_size, num_keys - j)
        matmul_add(rows, weights, j, KEY_TILE, cache, start, head_size, acc, acc_offset, head_size, depth, head_size)
        j += depth
