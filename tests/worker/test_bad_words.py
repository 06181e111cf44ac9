"""Which tokens would complete a bad word: against a search by hand, and what it costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2, worker_pb2
from worker_svc.mirror import bad_words
from worker_svc.mirror.bad_words import BadWords
from worker_svc.mirror.sequence_states import SequenceStates

MIB = 1 << 20
tokens = st.integers(0, 2)  # so few that begins are found, and are ends of one another


def completing(words: list[list[int]], history: list[int]) -> set[int]:
    """By definition: the last tokens of words whose other tokens are the end of the history."""
    return {
        word[-1] for word in words if word and (history[len(history) - len(word) + 1 :] == word[:-1] or len(word) == 1)
    }


@pytest.mark.parametrize("base", [bad_words.BASE, np.uint64(1), np.uint64(0)], ids=["as is", "sums", "last token"])
@given(words=st.lists(st.lists(tokens, max_size=6), max_size=12), history=st.lists(tokens, min_size=1, max_size=12))
def test_what_is_found_is_what_a_search_by_hand_finds(
    base: np.uint64, words: list[list[int]], history: list[int]
) -> None:
    """With other bases nearly all hashes are equal, and it is the comparison that tells begins apart."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bad_words, "BASE", base)
        found = BadWords(words).ends(np.array(history, np.int32))
    assert set(found.tolist()) == completing([word for word in words if len(word) <= len(history) + 1], history)


def test_only_words_of_several_tokens_need_a_history() -> None:
    assert not BadWords([]) and not BadWords([[]])
    assert not BadWords([[3], [4]]).needs_history and BadWords([[3], [4, 5]]).needs_history


def step_with(words: list[list[int]]) -> worker_pb2.Step:
    step = worker_pb2.Step(step_id=1)
    params = inference_pb2.SamplingParams(seed=1, logit_bias={token: 1.0 for token in range(100)})
    group = step.groups.add(request_id="it", num_prompt_tokens=1, sampling_params=params)
    group.stop_token_ids_u32 = np.arange(50_000, dtype="<u4").tobytes()
    group.bad_words.extend(inference_pb2.TokenIds(ids=word) for word in words)
    for slot in range(2):
        group.sequences.add(slot=slot, token_ids=[1, 2, 3])
    return step


def test_memory_is_that_of_the_words_and_comes_back_with_the_slot() -> None:
    """One long word among many: a table of them all at its length would take 8 GiB."""
    numbers = np.random.default_rng(1)
    words = [numbers.integers(0, 50_000, 1_000_000).tolist()]
    words += [numbers.integers(0, 50_000, 3).tolist() for _ in range(1023)]
    step = step_with(words)
    release = worker_pb2.Step(step_id=2, released_slots_u16=np.array([0, 1, 2], "<u2").tobytes())
    states = SequenceStates(64, 16, 4, 4)
    tracemalloc.start()
    try:
        states.apply_blocks(step)
        fork = worker_pb2.Step(step_id=2, forks_u16=np.array([0, 2], "<u2").tobytes(), fork_indices_u16=b"\2\0")
        states.apply_blocks(fork)
        held, peak = tracemalloc.get_traced_memory()
        assert held < 8 * MIB, "shared by all sequences of the group"
        assert peak < 64 * MIB
        words_of_it = states.sampling.bad_words[0]
        assert words_of_it is not None and words_of_it is states.sampling.bad_words[2]
        tracemalloc.reset_peak()
        words_of_it.ends(np.arange(4000, dtype=np.int32))
        assert tracemalloc.get_traced_memory()[1] - held < MIB // 4, "what a look takes is that of a history"
        del words_of_it
        states.apply_blocks(release)
        assert tracemalloc.get_traced_memory()[0] < MIB // 4
    finally:
        tracemalloc.stop()


def test_a_look_compares_only_what_its_hash_found(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(2)
    words = [[*numbers.integers(0, 9, numbers.integers(1, 60)).tolist(), 7] for _ in range(1024)]
    words += [[4, 5, 6, end] for end in range(500)]
    compared, equal = [], np.array_equal

    def counted(one: np.ndarray, other: np.ndarray) -> bool:
        compared.append(len(one))
        return equal(one, other)

    monkeypatch.setattr(np, "array_equal", counted)
    history = np.array([*numbers.integers(0, 9, 300), 4, 5, 6], np.int32)
    found = BadWords(words).ends(history)
    assert set(found.tolist()) == completing(words, history.tolist()) >= set(range(500))
    assert len(compared) < 5
