"""Paged attention of a few decode rows for threads whose number does not divide theirs; see `attention` for the sums.

A sequence that is decoded alone has an item for each key/value head: three for two threads, or one for sixteen. Each
thread gets as many whole items as all can have, and what is left is cut where no sum is: scores by keys, softmaxes by
rows, weighted values by columns.

    thread 0   item 0 | scores of keys 0 .. 127    | rows 0, 1 | columns 0 .. 31
    thread 1   item 1 | scores of keys 128 .. 255  | row 2     | columns 32 .. 63   of item 2
                                                   ^           ^ all threads wait for what was begun before

Every sum is that of `attention_item.attend` bit for bit: weights, and what sums shrink by at a new maximum, come from
the tiles of keys in order, and a column adds its keys in order.

A unit is a tile of keys of an item that is cut. It has scores [group, 64] of its own, which become weights.

One layer, one sequence, keys and values in memory, two Zen 5 cores, in place of whole items alone: 88 us in place of 97
for 9 heads over 3 of 64 elements and 1,000 tokens, 290 in place of 340 for 4,000; 34 in place of 46 for 4 heads over
one of 256 and 400 tokens, 82 in place of 116 for 1,000. Two cores read memory 1.5 times as fast as one does.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kernels.cpu.attention.attention_item import FEW_ROWS, ROW_BLOCK, attend
from kernels.cpu.attention.attention_registers import add_scores, add_values
from kernels.cpu.attention.attention_softmax import NO_MAXIMUM, mask, multiply_by, softmax
from kernels.cpu.attention.attention_tiles import COUNT, KEY_TILE, NUM_SEQUENCES, RUN, TOKEN, keys_of, position_of
from kernels.cpu.attention.cache_reads import END, KEY, RUNS_SIZE, find_runs
from kernels.cpu.shared_work import counters, shared, wait
from kernels.cpu.vectors.numbers import borrowed, exp, from_float32, keep, to_float32
from kernels.cpu.vectors.vector_code import LANES

MOST_ROUNDS = 3  # of whole items: with more a thread that is through early takes another, and little is left over
# Bytes that each thread would be idle for in the last round. Cutting one item for two threads took 24 us in place of 28
# to save 205 KB, and 19 in place of 18 to save 51.
IDLE_BYTES = 1 << 17
CHUNKS = 8  # of units, at most, for each thread: what one is late with others take


@njit(nogil=True)
def is_split_better(tiles, keys, layout, group, seq_lens, query_starts, window, threads):  # type: ignore[no-untyped-def]
    """Whether `tiles` are few enough, and long, and each the one new token of a sequence, its keys used in place."""
    num_kv_heads, block_size, head_size = layout
    num_items = tiles.shape[0] * num_kv_heads
    left = num_items % threads
    if left == 0 or num_items >= MOST_ROUNDS * threads:
        return False
    if head_size % LANES != 0 or block_size % RUN != 0 or group > FEW_ROWS:
        return False
    for tile in tiles:
        if tile[COUNT] != 1 or tile[NUM_SEQUENCES] != 1:
            return False
    _, first_key, end_key = keys_of(tiles[-1], 1, seq_lens, query_starts, window)
    bytes_of_item = 2 * (end_key - first_key) * head_size * keys.itemsize
    return bytes_of_item * (threads - left) >= IDLE_BYTES * threads


@njit(nogil=True, parallel=True, cache=True)
def attend_split(  # type: ignore[no-untyped-def]
    threads,
    tiles,
    out,
    query,
    key_cache,
    value_cache,
    layout,
    group,
    tables,
    seq_lens,
    query_starts,
    slopes,
    scale,
    window,
    cap,
):
    """All items of `tiles`, each one token whose keys are used in place; arguments as of `attend`."""
    num_kv_heads, block_size, head_size = layout
    whole = tiles.shape[0] * num_kv_heads // threads
    first_units = _first_units(tiles, num_kv_heads, whole * threads, seq_lens, query_starts, window)
    num_cut = first_units.size - 1
    num_units, num_rows = first_units[num_cut], num_cut * group
    chunks = max(1, min(num_units // threads, CHUNKS))
    num_parts = threads * (whole + chunks)
    columns = _cuts_of_columns(num_cut, head_size // LANES, threads)
    # Scores, what they shrink by, and a cache line for each maximum and sum, as threads write them side by side.
    scratch = np.empty(num_units * group * (KEY_TILE + 1) + 2 * num_rows * LANES, dtype=np.float32)
    counts = counters(threads, 3)
    for thread in prange(threads):
        # Put together in here: a loop's threads are handed arrays and numbers, no tuples.
        team = counts, np.int64(thread), threads
        heads_layout, cut = (num_kv_heads, block_size, head_size), (whole * threads, first_units)
        step = tiles, heads_layout, group, tables, seq_lens, query_starts, window
        workspace = borrowed(scratch)
        scores, shrinks = workspace[: num_units * group * KEY_TILE], workspace[num_units * group * KEY_TILE :]
        maxima, sums = shrinks[num_units * group :], shrinks[num_units * group + num_rows * LANES :]
        cache = key_cache, value_cache, heads_layout, group, tables
        rest = tiles, out, query, *cache, seq_lens, query_starts, slopes, scale, window, cap
        _attend_or_score_shared(team, 0, num_parts, (threads, whole, chunks, cut, step, scores, rest))
        wait(team, 0, num_parts)
        _weigh_shared(team, 1, num_rows, (cut, step, slopes, cap, scores, shrinks, maxima, sums))
        wait(team, 1, num_rows)
        results = scores, shrinks, sums, out
        _add_up_shared(team, 2, columns.size - 1, (cut, step, columns, value_cache, results))
        keep(scratch)


@njit(nogil=True)
def _first_units(tiles, num_kv_heads, first_item, seq_lens, query_starts, window):  # type: ignore[no-untyped-def]
    """i64[items + 1]: where the units of each item from `first_item` on begin."""
    first_units = np.zeros(tiles.shape[0] * num_kv_heads - first_item + 1, dtype=np.int64)
    for i in range(first_units.size - 1):
        _, key, end_key = keys_of(tiles[(first_item + i) // num_kv_heads], 1, seq_lens, query_starts, window)
        first_units[i + 1] = first_units[i] + (end_key - key + KEY_TILE - 1) // KEY_TILE
    return first_units


@njit(nogil=True)
def _cuts_of_columns(num_items, vectors, threads):  # type: ignore[no-untyped-def]
    """Where the columns of items are cut, in vectors: between items, and into equal shares for threads.

    What lies side by side is read at once as far as it can be: lines of a page that are left out come all the same.
    """
    cuts, num_cuts = np.zeros(num_items + threads + 1, dtype=np.int64), 1
    item, thread = 1, 1
    while item <= num_items:
        of_item, of_thread = item * vectors, num_items * vectors * thread // threads
        if min(of_item, of_thread) > cuts[num_cuts - 1]:
            cuts[num_cuts] = min(of_item, of_thread)
            num_cuts += 1
        if of_item <= of_thread:
            item += 1
        else:
            thread += 1
    return cuts[:num_cuts]


@njit(nogil=True)
def _find_runs_of_unit(runs, unit, i, cut, step):  # type: ignore[no-untyped-def]
    """Fill `runs` (`cache_reads`) for the keys of a unit of the item number `i` of those that are cut."""
    first_item, first_units = cut
    tiles, layout, _, tables, seq_lens, query_starts, window = step
    t, kv_head = divmod(first_item + i, layout[0])
    s, first_key, end_key = keys_of(tiles[t], 1, seq_lens, query_starts, window)
    find_runs(runs, kv_head, s, first_key + (unit - first_units[i]) * KEY_TILE, end_key, tables, layout)


@njit(nogil=True)
def _attend_or_score(part, end, threads, whole, chunks, cut, step, scores, rest):  # type: ignore[no-untyped-def]
    """Of each thread's parts the first are whole items, then come chunks of units."""
    thread, place = divmod(part, whole + chunks)
    if place < whole:
        attend(thread * whole + place, (thread + 1) * whole, *rest)
    else:
        num_units, chunk, next_thread = cut[1][-1], thread * chunks + place - whole, (thread + 1) * chunks
        first, end_unit = num_units * chunk // (threads * chunks), num_units * (chunk + 1) // (threads * chunks)
        _score(first, end_unit, num_units * next_thread // (threads * chunks), cut, step, scores, rest)


@njit(nogil=True)
def _score(first, end, likely_end, cut, step, scores, rest):  # type: ignore[no-untyped-def]
    """The scores of units first..end; those up to `likely_end` are likely to come next."""
    first_item, first_units = cut
    tiles, (num_kv_heads, _, head_size), group = step[0], step[1], step[2]
    query, key_cache, scale = rest[2], rest[3], rest[11]
    numbers, places = np.empty(group * head_size, dtype=np.float32), np.zeros(2 * RUNS_SIZE, dtype=np.int64)
    q, here, ahead = borrowed(numbers), borrowed(places)[:RUNS_SIZE], borrowed(places)[RUNS_SIZE:]
    i, q_of = 0, -1
    for unit in range(first, end):
        while unit >= first_units[i + 1]:
            i += 1
        _find_runs_of_unit(here, unit, i, cut, step)
        if unit + 1 < likely_end:
            _find_runs_of_unit(ahead, unit + 1, i if unit + 1 < first_units[i + 1] else i + 1, cut, step)
        if q_of != i:
            q_of, (t, kv_head) = i, divmod(first_item + i, num_kv_heads)
            line = query[tiles[t, TOKEN], kv_head * group * head_size : (kv_head + 1) * group * head_size]
            for d in range(group * head_size):
                q[d] = to_float32(line[d]) * scale
        for row in range(0, group, ROW_BLOCK):
            of_rows, rows = scores[(unit * group + row) * KEY_TILE :], min(ROW_BLOCK, group - row)
            after = ahead if row + ROW_BLOCK >= group else here
            add_scores(rows, q, row * head_size, head_size, key_cache, here, of_rows, KEY_TILE, key_cache, after)
    keep(numbers)
    keep(places)


@njit(nogil=True)
def _weigh(row, end, cut, step, slopes, cap, scores, shrinks, maxima, sums):  # type: ignore[no-untyped-def]
    """The weights of a row from its scores, their sum, and for each unit what the sums before it shrink by."""
    first_item, first_units = cut
    tiles, (num_kv_heads, _, _), group, _, seq_lens, query_starts, window = step
    i, r = divmod(row, group)
    t, kv_head = divmod(first_item + i, num_kv_heads)
    _, key, _ = keys_of(tiles[t], 1, seq_lens, query_starts, window)
    distance = key - position_of(tiles[t], 0, seq_lens, query_starts)
    slope = slopes[kv_head * group + r] if slopes.size > 0 else np.float32(0.0)
    last = maxima[row * LANES] = NO_MAXIMUM
    sums[row * LANES] = np.float32(0.0)
    for place in range(first_units[i] * group + r, first_units[i + 1] * group, group):
        mask(scores, place * KEY_TILE, distance, slope, window, cap)
        # Nothing of the values is added up yet: a sum of no width to scale.
        softmax(1, scores, place * KEY_TILE, maxima, sums, row * LANES, sums, 0)
        maximum = maxima[row * LANES]
        shrinks[place] = exp(last - maximum) if maximum > last else np.float32(1.0)
        last = maximum
        distance += KEY_TILE


@njit(nogil=True, error_model="numpy")  # as `attend`
def _add_up(part, end, cut, step, columns, value_cache, results):  # type: ignore[no-untyped-def]
    """The result of an item's rows in some columns."""
    first_item, first_units = cut
    tiles, (num_kv_heads, _, head_size), group = step[0], step[1], step[2]
    scores, shrinks, sums, out = results
    i, first = divmod(columns[part] * LANES, head_size)
    width = (columns[part + 1] - columns[part]) * LANES
    t, kv_head = divmod(first_item + i, num_kv_heads)
    numbers, places = np.zeros(group * head_size, dtype=np.float32), np.zeros(2 * RUNS_SIZE, dtype=np.int64)
    acc, here, ahead = borrowed(numbers), borrowed(places)[:RUNS_SIZE], borrowed(places)[RUNS_SIZE:]
    for unit in range(first_units[i], first_units[i + 1]):
        _find_runs_of_unit(here, unit, i, cut, step)
        if unit + 1 < first_units[i + 1]:
            _find_runs_of_unit(ahead, unit + 1, i, cut, step)
        for row in range(group):
            shrink = shrinks[unit * group + row]
            if shrink != np.float32(1.0):
                multiply_by(acc, row * head_size + first, width, shrink)
        for row in range(0, group, ROW_BLOCK):
            rows, weights = min(ROW_BLOCK, group - row), scores[(unit * group + row) * KEY_TILE :]
            place, num_keys = row * head_size, here[END] - here[KEY]
            after = ahead if row + ROW_BLOCK >= group else here
            of_tile = KEY_TILE, value_cache, here, head_size, first, first + width, num_keys
            add_values(rows, weights, *of_tile, acc, place, value_cache, after)
    for row in range(group):
        head = kv_head * group + row
        line = out[tiles[t, TOKEN], head * head_size + first : head * head_size + first + width]
        weighted = acc[row * head_size + first : row * head_size + first + width]
        share = np.float32(1.0) / sums[(i * group + row) * LANES]
        for d in range(width):
            line[d] = from_float32(weighted[d] * share, line[d])
    keep(numbers)
    keep(places)


_attend_or_score_shared, _weigh_shared, _add_up_shared = shared(_attend_or_score), shared(_weigh), shared(_add_up)
