"""An item of paged attention, a tile of query tokens and a key/value head, computed from end to end.

See `attention` for the sums and `attention_tiles` for the tiles. Few rows take keys and values from where they lie in
the cache, and prefetch what comes next from run to run. Many rows, of a prompt or of sequences over a common prefix,
share a copy of them: keys transposed, values as float32; they prefetch the next tile, a piece before each step. What no
row of a block sees yet is not multiplied.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.attention.attention_registers import add_scores, add_values
from kernels.cpu.attention.attention_softmax import NO_MAXIMUM, mask, softmax
from kernels.cpu.attention.attention_tiles import (
    COUNT,
    KEY_TILE,
    NUM_SEQUENCES,
    RUN,
    SHARED,
    TOKEN,
    keys_of,
    position_of,
)
from kernels.cpu.attention.cache_reads import (
    END,
    PIECES,
    RUNS_SIZE,
    find_runs,
    prefetch_piece,
    read_keys,
    read_values,
)
from kernels.cpu.vectors.float_tile import matmul_add, prefetch_line
from kernels.cpu.vectors.numbers import address_of, borrowed, from_float32, keep, to_float32
from kernels.cpu.vectors.vector_code import LANES

ROW_BLOCK = 4  # rows multiplied at once: 4 x 4 accumulators, 4 vectors of keys, of 32 registers
FEW_ROWS = 8  # so many are quicker without a copy of keys and values, though each ROW_BLOCK of them reads anew


@njit(nogil=True)
def _prefetch_query(item, end, row, end_row, tiles, query, num_kv_heads, group, head_size):  # type: ignore[no-untyped-def]
    """Prefetch some rows of an item that is likely to come next: they lie far apart, out of sight of the processor."""
    if item < end:
        tile, first = tiles[item // num_kv_heads], item % num_kv_heads * group * head_size
        for token in range(row // group, min(end_row // group, tile[COUNT])):
            prefetch_line(query[tile[TOKEN] + token, first : first + group * head_size])


@njit(nogil=True, error_model="numpy")  # where all scores are -inf the sum of weights is 0, and the result NaN
def attend(  # type: ignore[no-untyped-def]
    item,
    end,
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
    """Item `item`: tile item // num_kv_heads and head item % num_kv_heads; those up to `end` are likely to come next.

    out and query [T, num_heads * head_size], caches flat, `layout` (num_kv_heads, block_size, head_size), `group` the
    query heads of a key/value head, `slopes` f32[num_heads] or, without ALiBi, empty.
    """
    num_kv_heads, block_size, head_size = layout
    padded = (head_size + LANES - 1) // LANES * LANES
    tile, kv_head = tiles[item // num_kv_heads], item % num_kv_heads
    token, members, rows = tile[TOKEN], tile[NUM_SEQUENCES], tile[COUNT] * group
    may_stay = padded == head_size and block_size % RUN == 0
    copy_size = 0 if may_stay and rows <= FEW_ROWS else KEY_TILE * padded
    size = (ROW_BLOCK + 1) * KEY_TILE + 2 * rows * padded + 2 * copy_size + 2 * rows + LANES
    scratch = np.empty(size, dtype=np.float32)
    places = np.zeros(2 * RUNS_SIZE + rows, dtype=np.int64)
    # Vectors of scores and of sums begin where lines of the caches do.
    numbers = borrowed(scratch)[-(address_of(scratch) // 4) % LANES :]
    zeros, numbers = numbers[:KEY_TILE], numbers[KEY_TILE:]
    scores, numbers = numbers[: ROW_BLOCK * KEY_TILE], numbers[ROW_BLOCK * KEY_TILE :]
    q, acc, numbers = numbers[: rows * padded], numbers[rows * padded :][: rows * padded], numbers[2 * rows * padded :]
    values, keys_t, numbers = numbers[:copy_size], numbers[copy_size:][:copy_size], numbers[2 * copy_size :]
    maxima, sums = numbers[:rows], numbers[rows:][:rows]
    here, ahead = borrowed(places)[:RUNS_SIZE], borrowed(places)[RUNS_SIZE:][:RUNS_SIZE]
    positions = borrowed(places)[2 * RUNS_SIZE :]
    zeros[:] = acc[:] = np.float32(0.0)
    maxima[:] = NO_MAXIMUM
    sums[:] = np.float32(0.0)
    for row in range(rows):
        head = kv_head * group + row % group
        line = query[token + row // group, head * head_size : (head + 1) * head_size]
        place = q[row * padded : (row + 1) * padded]
        for d in range(head_size):
            place[d] = to_float32(line[d]) * scale
        positions[row] = position_of(tile, row // group, seq_lens, query_starts)

    for phase in range(0 if tile[SHARED] > 0 else 1, members + 1):
        s, first_key, end_key = keys_of(tile, phase, seq_lens, query_starts, window)
        first_row, end_row = 0, rows
        if phase > 0 and members > 1:
            first_row, end_row = (phase - 1) * group, phase * group
        is_in_place = may_stay and end_row - first_row <= FEW_ROWS
        find_runs(here, kv_head, s, first_key, end_key, tables, layout)
        for key in range(first_key, end_key, KEY_TILE):
            # Which keys come after these: of this phase, of this item's next, or of the next item.
            if key + KEY_TILE < end_key:
                find_runs(ahead, kv_head, s, key + KEY_TILE, end_key, tables, layout)
            elif phase < members:
                next_s, next_key, next_end = keys_of(tile, phase + 1, seq_lens, query_starts, window)
                find_runs(ahead, kv_head, next_s, next_key, next_end, tables, layout)
            elif item + 1 < end:
                other = tiles[(item + 1) // num_kv_heads]
                first_phase = 0 if other[SHARED] > 0 else 1
                next_s, next_key, next_end = keys_of(other, first_phase, seq_lens, query_starts, window)
                find_runs(ahead, (item + 1) % num_kv_heads, next_s, next_key, next_end, tables, layout)
            else:
                find_runs(ahead, kv_head, s, 0, 0, tables, layout)
            if not is_in_place:
                # The scratch of values serves the keys first.
                read_keys(key_cache, here, tables, layout, values, keys_t)
                read_values(value_cache, here, tables, layout, values)
            piece = 0
            for row in range(first_row, end_row, ROW_BLOCK):
                block_rows = min(ROW_BLOCK, end_row - row)
                # Up to the last key that any of these rows sees: weights of others are 0, and would add nothing.
                num_keys = min(here[END], positions[row + block_rows - 1] + 1) - key
                if phase == members and key + KEY_TILE >= end_key:
                    _prefetch_query(item + 1, end, row, row + block_rows, tiles, query, num_kv_heads, group, head_size)
                if num_keys <= 0:
                    continue
                if is_in_place:
                    add_scores(
                        block_rows, q, row * padded, head_size, key_cache, here, scores, KEY_TILE, value_cache, here
                    )
                else:
                    piece = prefetch_piece(piece, ahead, key_cache, value_cache, head_size)
                    width = (num_keys + LANES - 1) // LANES * LANES
                    others, sums_of = (keys_t, 0, KEY_TILE), (zeros, 0, 0, scores, 0, KEY_TILE)
                    matmul_add(block_rows, q, row * padded, padded, *others, *sums_of, head_size, width)
                for r in range(block_rows):
                    if not is_in_place:
                        piece = prefetch_piece(piece, ahead, key_cache, value_cache, head_size)
                    head = kv_head * group + (row + r) % group
                    slope = slopes[head] if slopes.size > 0 else np.float32(0.0)
                    mask(scores, r * KEY_TILE, key - positions[row + r], slope, window, cap)
                softmax(block_rows, scores, 0, maxima, sums, row, acc, padded)
                is_last = row + ROW_BLOCK >= end_row
                if is_in_place:
                    add_values(
                        block_rows,
                        scores,
                        KEY_TILE,
                        value_cache,
                        here,
                        head_size,
                        0,
                        head_size,
                        num_keys,
                        acc,
                        row * padded,
                        key_cache,
                        ahead if is_last else here,
                    )
                else:
                    while is_last and piece < PIECES:
                        piece = prefetch_piece(piece, ahead, key_cache, value_cache, head_size)
                    added_up = acc, row * padded, padded
                    factors = scores, 0, KEY_TILE, values, 0, padded
                    matmul_add(block_rows, *factors, *added_up, *added_up, num_keys, padded)
            here, ahead = ahead, here

    for row in range(rows):
        head = kv_head * group + row % group
        line = out[token + row // group, head * head_size : (head + 1) * head_size]
        weighted, share = acc[row * padded : (row + 1) * padded], np.float32(1.0) / sums[row]
        for d in range(head_size):
            line[d] = from_float32(weighted[d] * share, line[d])
    keep(scratch)
    keep(places)
