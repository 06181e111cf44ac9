"""Who computes what of paged attention: made once a step, on the device, and read by the kernels of all layers.

A graph of kernels is captured once for all batches of a size. Its grids cannot follow the lengths of sequences, and a
grid made for the longest that may come (256 sequences, 8 heads, 256 segments of 131,072 keys: half a million programs)
would mostly start programs that have nothing to do. So a grid is as large as the GPU. `plan_kernel` adds up the work of
all sequences, and each program finds its share by the sums.

A sequence is either *split*: pieces of its keys are summed by different programs, into scratch, and joined by a third
kernel; or *whole*: one program takes a tile of its rows through all keys. The plan, i32[5, S], a column a sequence:

    PIECE       keys that are summed together, in segments: 1, or SPAN; 0: the sequence is whole
    FIRST_LINE  of its sums in scratch, in tokens: piece p of token t has line FIRST_LINE + p * query_len + t
    SPLIT_END   work of the split sequences up to this one, in tiles of rows times tiles of keys
    TOKEN_END   tokens of the split sequences up to this one
    WHOLE_END   tiles of rows of the whole sequences up to this one

Scratch has a line for `num_lines` pieces of a token. First come the sequences with one new token, in segments, or in
spans if they do not fit; then those with several, in segments where they alone are too few tiles of rows to occupy
the GPU, else in spans; a sequence that is one piece, or does not fit any more, is whole. None of this changes a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.attention.segment import SEGMENT, SPAN

CHUNK = tl.constexpr(256)
PIECE, FIRST_LINE, SPLIT_END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOKEN_END, WHOLE_END = tl.constexpr(3), tl.constexpr(4)
NUM_FACTS = 5  # rows of a plan
# Arguments that differ from step to step: compiled for their divisors, a kernel would be compiled while serving.
OF_A_STEP = ("block_tables", "seq_lens", "query_starts", "num_sequences", "num_lines", "table_stride")


@triton.jit
def needed_keys(seq_len, query_len, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that any new token of a sequence sees."""
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - query_len + 1 - window, 0)
    return first


@triton.jit
def _parts(seq_len, first_key, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Into how many parts the keys from `first_key` on are cut at multiples of SIZE."""
    return tl.where(seq_len > 0, tl.cdiv(seq_len, SIZE) - first_key // SIZE, 0)


@triton.jit
def _work(  # type: ignore[no-untyped-def]
    sequences, num_sequences, seq_lens, query_starts, window, HAS_WINDOW: tl.constexpr
):
    """(query_len, seq_len, first_key, segments, spans) of sequences; 0 beyond the last."""
    inside = sequences < num_sequences
    query_len = tl.load(query_starts + sequences + 1, inside, 0) - tl.load(query_starts + sequences, inside, 0)
    seq_len = tl.load(seq_lens + sequences, inside, 0)
    first_key = needed_keys(seq_len, query_len, window, HAS_WINDOW)
    return (
        query_len,
        seq_len,
        first_key,
        _parts(seq_len, first_key, SEGMENT),
        _parts(seq_len, first_key, SEGMENT * SPAN),
    )


@triton.jit(do_not_specialize=OF_A_STEP)
def plan_kernel(  # type: ignore[no-untyped-def]
    plan,
    seq_lens,
    query_starts,
    num_sequences,
    num_kv_heads,
    num_lines,
    num_multiprocessors,
    window,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program; plan i32[NUM_FACTS, num_sequences]."""
    fine_of_one, coarse_of_one, fine_of_several, tiles_of_several = 0, 0, 0, 0
    for chunk in range(0, num_sequences, CHUNK):
        query_len, _, _, segments, spans = _work(
            chunk + tl.arange(0, CHUNK), num_sequences, seq_lens, query_starts, window, HAS_WINDOW
        )
        fine_of_one += tl.sum(tl.where(query_len == 1, segments, 0))
        coarse_of_one += tl.sum(tl.where(query_len == 1, spans, 0))
        fine_of_several += tl.sum(tl.where((query_len > 1) & (segments > 1), query_len * segments, 0))
        tiles_of_several += tl.sum(tl.where(query_len > 1, tl.cdiv(query_len * GROUP, WHOLE_ROWS), 0))
    piece_of_one = tl.where(fine_of_one <= num_lines, 1, SPAN)
    lines_of_one = tl.where(fine_of_one <= num_lines, fine_of_one, coarse_of_one)
    is_fine = (tiles_of_several * num_kv_heads < num_multiprocessors) & (fine_of_several + lines_of_one <= num_lines)
    piece_of_several = tl.where(is_fine, 1, SPAN)

    first_of_one, first_of_several = 0, lines_of_one
    split_end, token_end, whole_end = 0, 0, 0
    for chunk in range(0, num_sequences, CHUNK):
        sequences = chunk + tl.arange(0, CHUNK)
        query_len, seq_len, first_key, segments, spans = _work(
            sequences, num_sequences, seq_lens, query_starts, window, HAS_WINDOW
        )
        is_one = query_len == 1
        piece = tl.where(is_one, piece_of_one, piece_of_several)
        lines = query_len * tl.where(piece == 1, segments, spans)
        # Of sequences with several tokens: those that are more than one piece, and fit.
        may_split = (query_len > 1) & (lines > query_len)
        of_several = tl.where(may_split, lines, 0)
        ends = first_of_several + tl.cumsum(of_several)
        is_split = is_one | (may_split & (ends <= num_lines))
        of_one = tl.where(is_one, lines, 0)
        first_line = tl.where(is_one, first_of_one + tl.cumsum(of_one) - of_one, ends - of_several)
        tiles = _parts(seq_len, first_key, KEY_TILE) * tl.cdiv(query_len * GROUP, SPLIT_ROWS)
        work = tl.where(is_split, tiles, 0)
        tokens = tl.where(is_split, query_len, 0)
        whole = tl.where(is_split, 0, tl.cdiv(query_len * GROUP, WHOLE_ROWS))

        inside = sequences < num_sequences
        tl.store(plan + PIECE * num_sequences + sequences, tl.where(is_split, piece, 0), inside)
        tl.store(plan + FIRST_LINE * num_sequences + sequences, first_line, inside)
        tl.store(plan + SPLIT_END * num_sequences + sequences, split_end + tl.cumsum(work), inside)
        tl.store(plan + TOKEN_END * num_sequences + sequences, token_end + tl.cumsum(tokens), inside)
        tl.store(plan + WHOLE_END * num_sequences + sequences, whole_end + tl.cumsum(whole), inside)
        first_of_one += tl.sum(of_one)
        first_of_several += tl.sum(of_several)
        split_end += tl.sum(work)
        token_end += tl.sum(tokens)
        whole_end += tl.sum(whole)


@triton.jit
def sequence_of(ends, num_sequences, place, factor):  # type: ignore[no-untyped-def]
    """(the first sequence that `ends` beyond `place`, where the one before it ends), ends counted `factor` times.

    A sequence that has nothing ends where the one before it does, and is passed over.
    """
    sequence = tl.zeros([], tl.int32)
    for chunk in range(0, num_sequences, CHUNK):
        sequences = chunk + tl.arange(0, CHUNK)
        inside = sequences < num_sequences
        is_before = inside & (tl.load(ends + sequences, inside, 0).to(tl.int64) * factor <= place)
        sequence += tl.sum(is_before.to(tl.int32))
    before = tl.load(ends + sequence - 1, sequence > 0, 0)
    return sequence, before.to(tl.int64) * factor
