"""Paged attention over one segment of the context: what rows of queries gather from at most 512 keys, and how such
results are joined. The prefill kernel and the decode kernel are both made of this.

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867) for the softmax with a running maximum, Dao 2023
(arXiv:2307.08691) for its tiles, Kwon et al. 2023 (arXiv:2309.06180) for the paged cache. docs/paged-attention.md draws
all of it. Layout of a cache: [num_blocks, num_kv_heads, block_size, head_size], a block's elements contiguous.

The result is, of each row over the keys that it sees in the segment,

    m = max of logits    total = sum of 2^(logit - m)    acc = sum of 2^(logit - m) value, [rows, HEAD_TILE]

with logits in powers of two: log2(e) is part of the scale, and every exponential is an `exp2`.

Why a row's bits depend on nothing but its token, its sequence and the cache: tiles begin at multiples of KEY_TILE and
segments at multiples of SEGMENT, counted in positions of the sequence; a key that a row must not see has weight 0, and
a tile of such keys leaves m, total and acc as they were; products are sums over one row; and what a compiler may round
once or twice is written as `fma`, or has no sum after its product.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Keys whose sums are kept apart. The unit of work in decode: shorter ones occupy more of a GPU where sequences are few,
# longer ones cost less to join. Of a group of 4 heads of 128, 2 KiB are written and read again for 256 KiB of keys and
# values in 16 bits: 1.6 %.
SEGMENT = tl.constexpr(512)
# Segments that are joined by themselves before spans are. What a long context leaves in scratch where a segment each is
# too much, and the keys between two writings of a whole tile's sums: of 8,192, 128 rows of 128 write and read 130 KiB
# again for the 4 MiB of keys and values that they have read in 16 bits.
SPAN = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    cache, elements, needed, HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr, DOT_TYPE: tl.constexpr
):
    """Keys or values of a tile, [KEY_TILE, HEAD_TILE] as they are multiplied; 0 where they are not `needed`.

    elements i64[KEY_TILE]: where in `cache` each begins. The one place where a cache's type becomes that of products;
    what a cache's numbers were divided by is left to the logits' scale and to the result.
    """
    dims = tl.arange(0, HEAD_TILE)
    mask = needed[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load((cache + dims)[None, :] + elements[:, None], mask, 0.0).to(DOT_TYPE)


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    so_far_m,
    so_far_total,
    so_far_acc,
    query,
    key_cache,
    value_cache,
    block_lines,
    table,
    head,
    begin_tile,
    end_tile,
    first_key,
    end_key,
    first_full,
    end_full,
    positions,
    slopes,
    logit_scale,
    soft_cap,
    window,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    JOINS: tl.constexpr,
    SUMS_ARE_PRODUCTS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """`so_far`, (m, total, acc), joined with the tiles begin_tile..end_tile: of one segment, or with JOINS of several.

    JOINS is for where a thread's registers suffice for both sums in this loop: tiles are then copied ahead over the
    border of a segment, where otherwise the loop ends and the next one waits for its first keys.

    query [ROWS, HEAD_TILE]; positions i32[ROWS] of the rows' tokens; slopes f32[ROWS]. From a block's first line of
    HEAD_SIZE elements to the next block's there are `block_lines`. Keys first_key..end_key are seen by some row, others
    are not read. Those of tiles first_full..end_full are seen by every row, and not compared with positions.
    `logit_scale` makes powers of two of query . key. With a soft cap the logit is `soft_cap * tanh(logit_scale / 2 /
    log2(e) * query . key)`, and `soft_cap` and `slopes` hold the log2(e).
    """
    TILES: tl.constexpr = SEGMENT // KEY_TILE
    m, total, acc = nothing(ROWS, HEAD_TILE)
    # Blocks are read one tile ahead of keys, which are copied two tiles ahead of the products.
    places = begin_tile * KEY_TILE + tl.arange(0, KEY_TILE)
    blocks = tl.load(table + places.to(tl.uint32) // BLOCK_SIZE, places < end_key, 0)
    for tile in tl.range(begin_tile, end_tile, disable_licm=True):
        # At the top, where no product is under way: at the end, Hopper's would have to wait for each other. `acc` is
        # left as it is: from a maximum of nothing it decays to 0, below.
        if JOINS and tile // TILES * TILES == tile:
            so_far_m, so_far_total, so_far_acc = join(so_far_m, so_far_total, so_far_acc, m, total, acc)
            m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        places = tile * KEY_TILE + tl.arange(0, KEY_TILE)
        needed = places < end_key
        if HAS_WINDOW:
            needed = needed & (places >= first_key)
        # In lines, and unsigned: a 32-bit product, a shift and a mask, and one 64-bit product by a constant.
        lines = blocks * block_lines + head * BLOCK_SIZE + (places.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        elements = lines.to(tl.uint32).to(tl.int64) * HEAD_SIZE
        keys = load_tile(key_cache, elements, needed, HEAD_SIZE, HEAD_TILE, DOT_TYPE)
        values = load_tile(value_cache, elements, needed, HEAD_SIZE, HEAD_TILE, DOT_TYPE)
        next_places = places + KEY_TILE
        blocks = tl.load(table + next_places.to(tl.uint32) // BLOCK_SIZE, next_places < end_key, 0)

        logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
        # What is left to be multiplied when the maximum is known: one fma for both.
        factor = logit_scale
        if HAS_SOFT_CAP:
            logits = soft_cap * (1.0 - 2.0 / (tl.exp2(logits * logit_scale) + 1.0))
            factor = 1.0
        if HAS_ALIBI:
            if not HAS_SOFT_CAP:
                logits = logits * logit_scale
                factor = 1.0
            distances = (places[None, :] - positions[:, None]).to(tl.float32)
            logits = tl.fma(tl.broadcast_to(slopes[:, None], logits.shape), distances, logits)
        is_partial = (tile < first_full) | (tile >= end_full)
        masked = logits
        if is_partial:
            visible = places[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (places[None, :] > positions[:, None] - window)
            masked = tl.where(visible, logits, float("-inf"))
        # No instruction comes of it, but that Triton sees one product follow the other. Past a branch it does not: it
        # shares the keys of a tile out to warps, and each tile's weights pass through shared memory. For large heads
        # that is better: a tile has rows for half of the warps only, and the others would do the same again.
        if HEAD_TILE <= 128:
            masked = tl.where(is_partial, masked, logits)
        logits = masked

        new_m = tl.maximum(m, tl.max(logits, 1) * factor)
        # Of a row that has seen nothing yet any finite number, so that no infinity is taken from itself.
        top = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights = tl.exp2(tl.fma(logits, tl.zeros_like(logits) + factor, tl.zeros_like(logits) - top[:, None]))
        # Of what was rounded already: exactly 1 where the maximum stays, which `fma` would miss.
        decay = tl.exp2(m - top)
        # With 0 added, so that what has decayed to -0 is as a new sum begins.
        acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), tl.zeros_like(acc))
        rounded = weights.to(DOT_TYPE)
        acc = tl.dot(rounded, values, acc, input_precision="ieee")
        if SUMS_ARE_PRODUCTS:
            # After the other product, so that Triton looks at this one first: it is narrower than high, whatever the
            # tile and the head, and so all three have the rows shared out to the warps.
            sums = tl.max(tl.dot(rounded, tl.full([KEY_TILE, 16], 1.0, DOT_TYPE)), 1)
        else:
            sums = tl.sum(weights, 1)
        total = tl.fma(total, decay, sums)
        m = new_m
    return join(so_far_m, so_far_total, so_far_acc, m, total, acc)


@triton.jit
def nothing(ROWS: tl.constexpr, HEAD_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The result over no keys; joined with another, on either side, it leaves that one's bits as they are."""
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    return m, total, tl.zeros([ROWS, HEAD_TILE], tl.float32)


@triton.jit
def _of_rows(x):  # type: ignore[no-untyped-def]
    """As a factor of [rows, HEAD_TILE]: x [rows] or [rows, 1]."""
    if len(x.shape) == 1:
        column = x[:, None]
    else:  # one `return` for both: Triton wants all of a function to give one type
        column = x
    return column


@triton.jit
def join(m, total, acc, next_m, next_total, next_acc):  # type: ignore[no-untyped-def]
    """The result of the keys so far and of the next. Maxima and totals are [rows], or all [rows, 1]."""
    new_m = tl.maximum(m, next_m)
    top = tl.where(new_m == float("-inf"), 0.0, new_m)
    old, new = tl.exp2(m - top), tl.exp2(next_m - top)
    total = tl.fma(total, old, next_total * new)
    acc = tl.fma(acc, tl.broadcast_to(_of_rows(old), acc.shape), next_acc * _of_rows(new))
    return new_m, total, acc


@triton.jit
def finish(m, total, acc, sinks, heads, value_scale, head, inside):  # type: ignore[no-untyped-def]
    """What rows attend to, f32[rows, HEAD_TILE]; zeros where they have seen no key.

    `heads` of the rows, and whether a row is `inside` and has one, are of the shape of `m` and `total`.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, inside, 0.0) * LOG2_E
        top = tl.maximum(m, sink)
        decay = tl.exp2(m - top)
        total = tl.fma(total, decay, tl.exp2(sink - top))
        acc = acc * _of_rows(decay)
    result = acc / _of_rows(tl.where(total == 0.0, 1.0, total))
    if value_scale is not None:
        result = result * tl.load(value_scale + head)
    return result
