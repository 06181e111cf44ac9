"""Keys and values that the next attention will read, prefetched while the products before it compute.

Attention waits for memory. Products wait for the multipliers, and leave memory idle most of the time: so they prefetch
blocks of the cache, evenly, at most a line with each input that they multiply by, and attention finds them in the last
cache level. No more than that level has room for beside other things is prefetched, and nothing where its size is not
known.

`docs/cpu-performance.md` says what that gains.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numba import njit

from kernels.cpu.vectors.numbers import INT32, INT64, address_of, lines
from kernels.cpu.vectors.vector_code import CACHE_LINE_BYTES

NONE = np.int64(0)  # in place of a cursor's address
# A cursor is i64[PREFETCH_CURSOR_SIZE]: lines _NEXT to _END of a thread's share are not prefetched yet. 2^_SHIFT of
# them lie side by side in memory, from each of the addresses that begin at _PLACES. _RATE of `WHOLE` inputs prefetch.
# Who prefetches whole runs may still prefetch `_DUE` lines, in parts of `WHOLE`; less than 0: has prefetched too many.
_PLACES, _SHIFT, _RATE, _NEXT, _END, _DUE = range(6)
WHOLE = 1 << 8
PREFETCH_CURSOR_SIZE = 16  # no cache line holds two: threads that wrote to the same one made a pass 12 ms longer


def last_level_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """How much the largest cache of the first core holds; 0 where the system does not say."""
    sizes = (re.fullmatch(r"(\d+)K\s*", file.read_text()) for file in folder.glob("index*/size"))
    return max((int(size[1]) << 10 for size in sizes if size), default=0)


BUDGET_BYTES = last_level_bytes() // 2  # what a pass may prefetch before an attention


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
def _runs_of(block_bytes):  # type: ignore[no-untyped-def]
    """(how many runs of lines keys of a block are, or values, the power of two that each has)."""
    num_lines = (block_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES
    shift = 0
    while num_lines % 2 == 0:
        num_lines, shift = num_lines // 2, shift + 1
    return num_lines, shift


@njit(nogil=True)
def new_places(blocks, block_bytes):  # type: ignore[no-untyped-def]
    """i64[N] for the places that `plan_prefetch` writes, of all threads; block_bytes: of a block's keys, or values."""
    return np.empty(blocks.size * 2 * _runs_of(block_bytes)[0], dtype=np.int64)


@njit(nogil=True)
def plan_prefetch(cursor, places, blocks, thread, threads, keys, values, block_bytes, budget_bytes, num_inputs):  # type: ignore[no-untyped-def]
    """Point a thread's cursor, given by its address, at its share of blocks, or what of it fits `budget_bytes` of all.

    keys, values: where all of them begin. `places`, of `new_places`, gets the thread's own. `num_inputs`: how many
    prefetch before the attention, evenly: one after the other they took all that memory gives, and made the
    products that came first 8 to 20% slower.
    """
    fields = lines(cursor, INT64, 1, PREFETCH_CURSOR_SIZE)[0]
    first, end = blocks.size * thread // threads, blocks.size * (thread + 1) // threads
    end = min(end, first + budget_bytes // threads // (2 * block_bytes))
    num_runs, shift = _runs_of(block_bytes)
    own = places[first * 2 * num_runs : end * 2 * num_runs]
    i = 0
    for block in blocks[first:end]:
        for start in (keys, values):
            for run in range(num_runs):
                own[i] = start + block * block_bytes + (run << shift) * CACHE_LINE_BYTES
                i += 1
    fields[_PLACES], fields[_SHIFT], fields[_NEXT], fields[_END] = address_of(own), shift, 0, i << shift
    fields[_RATE] = min(WHOLE, (fields[_END] * WHOLE * 9 // 8 + num_inputs) // max(num_inputs, 1))


@njit(nogil=True)
def next_lines(cursor, num_inputs):  # type: ignore[no-untyped-def]
    """(places, shift, rate, first, count): what so many inputs prefetch, `count` lines from number `first` on.

    Input i prefetches line first + i * rate // `WHOLE`. Line n lies n % 2^shift lines behind the address that is number
    n // 2^shift of those at the address `places`.
    """
    fields = lines(cursor, INT64, 1, PREFETCH_CURSOR_SIZE)[0]
    first = fields[_NEXT]
    count = min((num_inputs - 1) * fields[_RATE] // WHOLE + 1, fields[_END] - first)
    fields[_NEXT] = first + count
    return fields[_PLACES], fields[_SHIFT], fields[_RATE], first, count


@njit(nogil=True)
def next_run(cursor, num_inputs):  # type: ignore[no-untyped-def]
    """(address, count): lines that lie one after the other, at most one for each of so many inputs; none where those
    before them have prefetched what will be theirs."""
    fields = lines(cursor, INT64, 1, PREFETCH_CURSOR_SIZE)[0]
    fields[_DUE] += num_inputs * fields[_RATE]
    first, left = fields[_NEXT], min(fields[_END] - fields[_NEXT], num_inputs)
    if fields[_DUE] <= 0 or left <= 0:
        return 0, 0
    shift = fields[_SHIFT]
    run, size = first >> shift, 1 << shift
    places = lines(fields[_PLACES], INT64, 1, fields[_END] >> shift)[0]
    count = size - first % size
    while count < left and places[run + 1] == places[run] + size * CACHE_LINE_BYTES:
        run, count = run + 1, count + size
    count = min(count, left)
    fields[_NEXT] = first + count
    fields[_DUE] -= count * WHOLE
    return places[first >> shift] + first % size * CACHE_LINE_BYTES, count
