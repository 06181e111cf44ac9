"""How long the sequences of a group may get, against blocks counted one by one; what can never fit."""

from __future__ import annotations

import random

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.errors import InvalidRequest
from scheduler_svc.requests.group_limits import GroupLimits, best_of, new_beam_search, num_outputs

LONG = 1 << 20


def _num_blocks(num_prompt_tokens: int, num_cached_tokens: int, num_sequences: int, block_size: int) -> int:
    """Blocks of sequences that have nothing in common but full blocks of the prompt."""
    blocks = set()
    for sequence in range(num_sequences):
        for position in range(num_cached_tokens):
            block = position // block_size
            is_shared = (block + 1) * block_size <= num_prompt_tokens
            blocks.add((block, None if is_shared else sequence))
    return len(blocks)


@pytest.mark.parametrize("seed", range(100))
def test_all_sequences_of_a_group_fit_together_at_their_longest_and_one_token_more_would_not(seed: int) -> None:
    numbers = random.Random(seed)
    block_size, num_sequences = numbers.choice([1, 2, 4, 16]), numbers.randint(1, 6)
    num_blocks, num_prompt_tokens = numbers.randint(1, 20), numbers.randint(1, 60)
    limits = GroupLimits(max_model_len=LONG, max_cached_tokens=num_blocks * block_size, block_size=block_size)

    def fits(num_cached_tokens: int) -> bool:
        return _num_blocks(num_prompt_tokens, num_cached_tokens, num_sequences, block_size) <= num_blocks

    try:
        longest = limits.max_num_tokens(num_prompt_tokens, pb.SamplingParams(n=num_sequences))
    except InvalidRequest:
        assert not fits(num_prompt_tokens + (num_sequences > 1))
    else:
        assert num_prompt_tokens < longest
        assert fits(longest - 1) and not fits(longest)  # the token drawn last is never cached


def test_a_group_that_can_never_fit_is_refused_with_both_numbers() -> None:
    limits = GroupLimits(max_model_len=256, max_cached_tokens=48 * 4, block_size=4)
    assert limits.max_num_tokens(170, pb.SamplingParams(n=6)) == 172 + 1
    with pytest.raises(InvalidRequest, match=r"7 sequences .* 170 .* at least 49 blocks of 4: .* holds 48") as refusal:
        limits.max_num_tokens(170, pb.SamplingParams(n=7))
    assert refusal.value.violations[0].field == "sampling_params.n"
    with pytest.raises(InvalidRequest, match="49 blocks") as refusal:
        limits.max_num_tokens(170, pb.SamplingParams(n=1, best_of=7))
    assert refusal.value.violations[0].field == "sampling_params.best_of"


def test_a_prompt_longer_than_a_step_is_refused_only_where_prompts_are_not_computed_in_chunks() -> None:
    limits = GroupLimits(max_model_len=256, max_cached_tokens=256, max_prompt_tokens=64)
    assert limits.max_num_tokens(64, pb.SamplingParams()) == 256
    with pytest.raises(InvalidRequest, match=r"65 tokens .* --enable-chunked-prefill .* takes 64"):
        limits.max_num_tokens(65, pb.SamplingParams())
    assert GroupLimits(max_model_len=256, max_cached_tokens=256).max_num_tokens(65, pb.SamplingParams()) == 256


def test_the_shortest_limit_counts() -> None:
    limits = GroupLimits(max_model_len=100, max_cached_tokens=80)
    assert limits.max_num_tokens(10, pb.SamplingParams(max_tokens=5)) == 15
    assert limits.max_num_tokens(10, pb.SamplingParams(max_tokens=500)) == 81
    assert GroupLimits(max_model_len=50, max_cached_tokens=80).max_num_tokens(10, pb.SamplingParams()) == 50
    for num_tokens, message in ((100, "the model takes 100"), (81, "a worker's cache holds 80")):
        with pytest.raises(InvalidRequest, match=f"{num_tokens} tokens .* {message}"):
            limits.max_num_tokens(num_tokens, pb.SamplingParams())


def test_best_of_is_n_where_it_is_not_given() -> None:
    for params, numbers in (
        (pb.SamplingParams(), (1, 1)),
        (pb.SamplingParams(n=3), (3, 3)),
        (pb.SamplingParams(best_of=3), (1, 3)),
        (pb.SamplingParams(n=2, best_of=3), (2, 3)),
    ):
        assert (num_outputs(params), best_of(params)) == numbers


def test_a_beam_search_is_as_wide_as_best_of_and_no_wider_than_the_vocabulary_allows() -> None:
    params = pb.SamplingParams(use_beam_search=True, n=1, best_of=6, temperature=0)
    search = new_beam_search(params, 5, 9, frozenset({1, 2}), vocab_size=8)
    assert search is not None and search.width == 6 and search.num_candidates == 8
    with pytest.raises(InvalidRequest, match="got 6; accepted: at most 5, the vocabulary less 3 end tokens"):
        new_beam_search(params, 5, 9, frozenset({1, 2, 3}), vocab_size=8)
    assert new_beam_search(pb.SamplingParams(n=6), 5, 9, frozenset({1, 2, 3}), vocab_size=8) is None
