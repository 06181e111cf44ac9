"""Keys and values that the next attention will read, asked for while the products before it compute.

Attention waits for memory. Products wait for the multipliers, and leave memory idle most of the time: so they ask for
blocks of the cache, a line with each input that they multiply by, and attention finds them in the last cache level. No
more than that level has room for beside other things is asked for, and nothing where its size is not known.

`docs/cpu-performance.md` says what that gains.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numba import njit

from kernels.cpu.numbers import INT32, INT64, lines
from kernels.cpu.vector_code import CACHE_LINE_BYTES

NONE = np.int64(0)  # in place of a cursor's address
# Of a cursor, i64[CURSOR_SIZE], what a lane has not asked for yet: where the numbers of blocks lie; the next and the
# end of its share, keys and values of a block counted as one each, and lines asked for of the next; where all keys and
# all values begin, and the bytes of a block of either.
_BLOCKS, _NEXT, _END, _LINE, _KEYS, _VALUES, _BLOCK_BYTES = range(7)
CURSOR_SIZE = 16  # no cache line holds two: lanes that wrote to the same one made a pass 12 ms longer


def last_level_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """How much the largest cache of the first core holds; 0 where the system does not say."""
    sizes = (re.fullmatch(r"(\d+)K\s*", file.read_text()) for file in folder.glob("index*/size"))
    return max((int(size[1]) << 10 for size in sizes if size), default=0)


ROOM_BYTES = last_level_bytes() // 2  # what a pass may ask for before an attention


@njit(nogil=True)
def blocks_before(tables_address, tables_stride, seq_lens_address, query_starts_address, count, block_size, window):  # type: ignore[no-untyped-def]
    """The blocks, i64[N], of tokens before those of this step that `count` sequences attend to.

    Those that a sequence has in common with the one before it come once, as attention may read them once.
    """
    tables = lines(tables_address, INT32, count, tables_stride)
    seq_lens = lines(seq_lens_address, INT32, 1, count)[0]
    query_starts = lines(query_starts_address, INT32, 1, count + 1)[0]
    blocks = np.empty(count * tables_stride, dtype=np.int64)
    num_blocks = 0
    for s in range(count):
        context_len = seq_lens[s] - (query_starts[s + 1] - query_starts[s])
        first = max(0, context_len + 1 - window) // block_size if window > 0 else 0
        for i in range(first, (context_len + block_size - 1) // block_size):
            if s == 0 or tables[s, i] != tables[s - 1, i]:
                blocks[num_blocks] = tables[s, i]
                num_blocks += 1
    return blocks[:num_blocks]


@njit(nogil=True)
def aim(cursor, blocks, lane, lanes, keys, values, block_bytes, room_bytes):  # type: ignore[no-untyped-def]
    """Point a lane's cursor, given by its address, at its share of blocks, or what of it fits `room_bytes` of all."""
    fields = lines(cursor, INT64, 1, CURSOR_SIZE)[0]
    first, end = blocks.size * lane // lanes, blocks.size * (lane + 1) // lanes
    room = room_bytes // lanes // (2 * block_bytes)
    fields[_BLOCKS], fields[_LINE] = blocks.ctypes.data, 0
    fields[_NEXT], fields[_END] = 2 * first, 2 * min(end, first + room)
    fields[_KEYS], fields[_VALUES], fields[_BLOCK_BYTES] = keys, values, block_bytes


@njit(nogil=True)
def next_lines(cursor, most):  # type: ignore[no-untyped-def]
    """(address, how many, at most `most`) of lines that lie one after the other and are to be asked for now."""
    fields = lines(cursor, INT64, 1, CURSOR_SIZE)[0]
    place, line, block_bytes = fields[_NEXT], fields[_LINE], fields[_BLOCK_BYTES]
    if place >= fields[_END]:
        return np.int64(0), np.int64(0)
    block = lines(fields[_BLOCKS], INT64, 1, fields[_END])[0][place // 2]
    start = fields[_KEYS + place % 2] + block * block_bytes + line * CACHE_LINE_BYTES
    left = (block_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES - line
    count = min(most, left)
    fields[_NEXT], fields[_LINE] = (place, line + count) if count < left else (place + 1, 0)
    return start, count
