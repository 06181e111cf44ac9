"""Which sequences are split, into what, where their sums go, and how many programs that occupies."""

from __future__ import annotations

import itertools
import random

import pytest

from kernels.gpu.attention.scratch import FEW_LINES, lines_needed
from tests.kernels.attention_plans import SEGMENT, SPAN, WHOLE_ROWS, cost, plan

MULTIPROCESSORS = 132


def test_decode_rows_are_cut_into_segments_and_padding_has_none() -> None:
    found = plan([1, 1, 1], [1000, 0, 513], num_lines=8)
    assert found.piece == [1, 1, 1] and found.first_line == [0, 2, 2] and found.token_end == [1, 2, 3]
    assert found.whole_end == [0, 0, 0]


def test_decode_rows_whose_segments_do_not_fit_are_cut_into_spans() -> None:
    """Of sequences that share blocks, all together may be longer than the cache."""
    longest, count = 131_072, 256
    found = plan([1] * count, [longest] * count, num_lines=lines_needed(count, longest))
    spans = longest // (SEGMENT * SPAN)
    assert found.piece == [SPAN] * count and found.first_line == [spans * i for i in range(count)]


def test_few_tokens_after_a_long_context_are_split_and_short_prompts_are_whole() -> None:
    found = plan([32, 1, 100, 1], [32_800, 10, 100, 5000], num_lines=FEW_LINES)
    assert found.piece == [1, 1, 0, 1], "one segment is one piece: nothing to split"
    assert found.token_end == [32, 33, 33, 34] and found.whole_end == [0, 0, 4, 4]
    assert found.first_line == [11, 0, found.first_line[2], 1], "first those with one new token"


def test_tokens_that_fill_the_gpu_are_whole_unless_one_sequence_among_them_is_long() -> None:
    assert plan([4096], [4096], num_lines=FEW_LINES).piece == [0]
    found = plan([4096, 64], [4096, 60_000], num_lines=FEW_LINES)
    assert found.piece == [0, SPAN] and found.first_line[1] == 0


def test_what_does_not_fit_any_more_is_whole() -> None:
    found = plan([8, 8, 1], [3000, 3000, 3000], num_lines=6 + 48 + 47, num_multiprocessors=1000)
    assert found.piece == [0, 0, 1], "in segments they do not fit, and each is one span"
    long = 3 * SEGMENT * SPAN
    found = plan([8, 8, 1], [long, long, long], num_lines=48 + 3 * 8 + 23)
    assert found.piece == [SPAN, 0, 1] and found.first_line[0] == 48


def test_a_window_leaves_pieces_out() -> None:
    found = plan([1, 1, 4], [10_000, 10_000, 10_003], num_lines=FEW_LINES, window=600)
    assert found.piece == [1, 1, 1] and found.first_line == [0, 2, 4]
    assert plan([4], [10_003], num_lines=7, window=600).piece == [0]


@pytest.mark.parametrize("seed", range(6))
def test_no_two_sequences_share_a_line(seed: int) -> None:
    chosen = random.Random(seed)
    count, window = chosen.choice([3, 300]), chosen.choice([0, 700])
    query_lens = [chosen.choice([0, 1, 1, 1, 2, 17, 300]) for _ in range(count)]
    seq_lens = [n and chosen.choice([n, n + 511, n + 9000, n + 40_000, 0]) for n in query_lens]
    num_lines = chosen.choice([lines_needed(count, 41_000), FEW_LINES, 10 * FEW_LINES])
    found = plan(query_lens, seq_lens, num_lines=num_lines, window=window)
    lines, tokens, tiles = [], 0, 0
    for query_len, seq_len, piece, first in zip(query_lens, seq_lens, found.piece, found.first_line, strict=True):
        assert piece or query_len != 1, "a decode step has no other kernel"
        if piece:
            size = piece * SEGMENT
            first_key = max(seq_len - query_len + 1 - window, 0) if window else 0
            num_pieces = -(-seq_len // size) - first_key // size if seq_len else 0
            lines.append(range(first, first + num_pieces * query_len))
            tokens += query_len
        else:
            tiles += -(-query_len * 4 // WHOLE_ROWS)
    used = sorted((part for part in lines if part), key=lambda part: part.start)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(used))
    assert not used or (used[0].start == 0 and used[-1].stop <= num_lines)
    assert (found.token_end[-1], found.whole_end[-1]) == (tokens, tiles)


@pytest.mark.parametrize("query_len", [1, 2, 16, 64, 512])
@pytest.mark.parametrize("context_len", [1024, 8192, 32_768, 131_072])
def test_new_tokens_after_a_context_occupy_an_h100(query_len: int, context_len: int) -> None:
    """Unless there are fewer segments, tiles of rows and heads than multiprocessors; 512 rows are 128 whole tiles."""
    found = cost(query_len, context_len + query_len, FEW_LINES)
    segments, row_tiles = -(-(context_len + query_len) // SEGMENT), -(-query_len * 4 // 64)
    assert found.items >= min(MULTIPROCESSORS, 8 * segments * row_tiles) or (query_len, found.items) == (512, 128)
    # The goal of 1.5 times the keys' and values' bytes holds for 32 tokens; what more of them leave is spread over
    # products that take longer than reading.
    if query_len <= 16:
        assert found.sum_bytes < 0.5 * found.cache_bytes
    assert found.sum_bytes < 10 * found.cache_bytes
