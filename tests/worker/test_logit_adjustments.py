"""Penalties, biases, forbidden tokens: each as the processor of that name in `transformers`, all as a plain chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from protos import inference_pb2, worker_pb2
from worker_svc.mirror.sequence_states import UNKNOWN, SequenceStates
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.logit_adjustments import LogitAdjustments
from worker_svc.sampling.token_counts import TokenCounts

VOCAB_SIZE = 61
MAX_LEN = 40


def states_of(*sequences: dict[str, Any], slots: list[int] | None = None) -> SequenceStates:
    """Each is `prompt`, `generated`, `stops` and `bad_words`, the rest sampling parameters."""
    states = SequenceStates(max(64, len(sequences)), MAX_LEN, 4, 4)
    step = worker_pb2.Step(step_id=1)
    for slot, sequence in zip(slots or range(len(sequences)), sequences, strict=True):
        given = dict(sequence)
        prompt, generated = given.pop("prompt"), given.pop("generated")
        stops, words = given.pop("stops", []), given.pop("bad_words", [])
        params = inference_pb2.SamplingParams(seed=1, **given)
        group = step.groups.add(request_id=str(slot), num_prompt_tokens=len(prompt), sampling_params=params)
        group.stop_token_ids_u32 = np.array(stops, "<u4").tobytes()
        group.bad_words.extend(inference_pb2.TokenIds(ids=word) for word in words)
        group.sequences.add(slot=slot, token_ids=[*prompt, *generated])
    states.apply_blocks(step)
    return states


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def adjusted(logits: torch.Tensor, *sequences: dict[str, Any]) -> torch.Tensor:
    states = states_of(*sequences)
    return LogitAdjustments(VOCAB_SIZE).apply(logits, states, np.arange(len(sequences)))


PROMPT, GENERATED = [3, 9, 9, 20, 7], [7, 11, 3, 11, 11, 5]

PROCESSORS: dict[str, tuple[dict[str, Any], LogitsProcessor]] = {
    "repetition": ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
    "repetition below one": ({"repetition_penalty": 0.7}, RepetitionPenaltyLogitsProcessor(0.7)),
    "min tokens": (
        {"min_tokens": 7, "stops": [4, 8]},
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [4, 8], device="cpu"),
    ),
    "min tokens reached": (
        {"min_tokens": 6, "stops": [4, 8]},
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [4, 8], device="cpu"),
    ),
    "logit bias": ({"logit_bias": {3: 2.5, 60: -7.0}}, SequenceBiasLogitsProcessor([[[3], 2.5], [[60], -7.0]])),
    "bad words": (
        {
            "bad_words": [
                [2],
                [5, 30],
                [11, 5, 31],
                [3, 5, 32],
                [7, 11, 3, 11, 11, 5, 33],
                [0, 34],
                [3, *PROMPT, *GENERATED, 36],
            ]
        },
        NoBadWordsLogitsProcessor(
            [[2], [5, 30], [11, 5, 31], [3, 5, 32], [7, 11, 3, 11, 11, 5, 33], [0, 34], [3, *PROMPT, *GENERATED, 36]]
        ),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_alone_is_the_processor_of_that_name(name: str) -> None:
    params, processor = PROCESSORS[name]
    logits = logits_of(1)
    ours = adjusted(logits, {"prompt": PROMPT, "generated": GENERATED, **params})
    history = torch.tensor([PROMPT + GENERATED])
    torch.testing.assert_close(ours, processor(history, logits.clone()), rtol=1e-6, atol=0)


def test_frequency_and_presence_count_what_was_generated() -> None:
    logits = logits_of(2)
    sequence = {"prompt": PROMPT, "generated": GENERATED}
    ours = adjusted(logits, {**sequence, "frequency_penalty": 0.5}, {**sequence, "presence_penalty": -1.25})
    expected = logits.clone()
    for token_id in GENERATED:
        expected[0, token_id] -= 0.5
    for token_id in set(GENERATED):
        expected[1, token_id] += 1.25
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_only_allowed_tokens_are_left() -> None:
    logits = logits_of(2)
    sequence = {"prompt": PROMPT, "generated": []}
    ours = adjusted(logits, sequence, {**sequence, "allowed_token_ids": [5, 40]})
    assert torch.equal(ours[0], logits[0])
    assert torch.isfinite(ours[1]).nonzero()[:, 0].tolist() == [5, 40]
    assert torch.equal(ours[1, [5, 40]], logits[1, [5, 40]])


def test_tokens_that_the_model_does_not_have_are_not_forbidden_to_others() -> None:
    logits, sequence = logits_of(3), {"prompt": PROMPT, "generated": []}
    beyond = {**sequence, "stops": [5, VOCAB_SIZE + 7], "min_tokens": 2, "bad_words": [[VOCAB_SIZE + 9]]}
    ours = adjusted(logits, beyond, sequence, beyond)
    assert torch.isinf(ours).nonzero().tolist() == [[0, 5], [2, 5]]
    assert torch.equal(ours[1], logits[1])


class Assignments(TorchDispatchMode):
    """Remembers how many dimensions what is assigned to indexed places has."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_put_.default:
            self.dims.append(args[2].dim())
        return func(*args, **(kwargs or {}))


def test_no_number_is_assigned_to_indexed_places() -> None:
    """It would be copied to a GPU, which the host waits for."""
    sequence = {"prompt": PROMPT, "generated": GENERATED, "stops": [4], "min_tokens": 9, "bad_words": [[8]]}
    with Assignments() as assignments:
        ours = adjusted(logits_of(1), {**sequence, "allowed_token_ids": [4, 5, 8, 40], "repetition_penalty": 1.3})
    assert torch.isfinite(ours[0]).nonzero()[:, 0].tolist() == [5, 40]
    assert assignments.dims and 0 not in assignments.dims


def test_where_nobody_asks_the_logits_are_the_same_tensor() -> None:
    logits = logits_of(1)
    assert adjusted(logits, {"prompt": PROMPT, "generated": GENERATED, "temperature": 0.5}) is logits


def chain(logits: torch.Tensor, sequence: dict[str, Any]) -> torch.Tensor:
    """The public surface's order, in float64, a token at a time."""
    history, generated = [*sequence["prompt"], *sequence["generated"]], sequence["generated"]
    out = logits.double().clone()
    for token in range(VOCAB_SIZE):
        banned = any(
            word[-1] == token and history[len(history) - len(word) + 1 :] == word[:-1] and len(word) <= len(history) + 1
            for word in sequence["bad_words"]
        )
        too_early = token in sequence["stops"] and len(generated) < sequence["min_tokens"]
        if banned or too_early or (sequence["allowed_token_ids"] and token not in sequence["allowed_token_ids"]):
            out[token] = -torch.inf
        out[token] += sequence["logit_bias"].get(token, 0.0)
        if token in history:
            out[token] = (
                out[token] / sequence["repetition_penalty"]
                if out[token] > 0
                else out[token] * sequence["repetition_penalty"]
            )
        out[token] -= sequence["frequency_penalty"] * generated.count(token) + sequence["presence_penalty"] * (
            token in generated
        )
    return out


def random_sequence(numbers: np.random.Generator) -> dict[str, Any]:
    tokens = lambda most: numbers.integers(0, VOCAB_SIZE, numbers.integers(0, most + 1)).tolist()  # noqa: E731
    prompt, generated = [1, *tokens(8)], tokens(10)
    history = prompt + generated
    words = [
        [*history[-int(numbers.integers(1, 4)) :], int(numbers.integers(VOCAB_SIZE))]
        for _ in range(numbers.integers(0, 3))
    ]
    return {
        "prompt": prompt,
        "generated": generated,
        "stops": tokens(3),
        "min_tokens": int(numbers.integers(0, 12)),
        "bad_words": [word for word in [*words, tokens(1)] if word],
        "allowed_token_ids": sorted(set(tokens(30))) if numbers.random() < 0.3 else [],
        "logit_bias": {int(token): float(np.float32(numbers.normal() * 5)) for token in tokens(5)},
        "repetition_penalty": float(np.float32(numbers.choice([1.0, 1.2, 0.8]))),
        "frequency_penalty": float(np.float32(numbers.choice([0.0, 0.7, -0.3]))),
        "presence_penalty": float(np.float32(numbers.choice([0.0, 1.1, -0.4]))),
    }


def test_256_rows_of_different_parameters_are_the_chain_and_each_as_it_is_alone() -> None:
    numbers = np.random.default_rng(0)
    sequences = [random_sequence(numbers) for _ in range(256)]
    logits = logits_of(256)
    together = adjusted(logits, *sequences)
    for row, sequence in enumerate(sequences):
        torch.testing.assert_close(together[row].double(), chain(logits[row], sequence), rtol=1e-5, atol=1e-5)
    for row in range(0, 256, 5):
        assert torch.equal(adjusted(logits[row : row + 1], sequences[row])[0], together[row])


@given(data=st.data())
def test_counts_follow_the_mirror_whatever_happens_to_a_slot(data: st.DataObject) -> None:
    """Draws, forks, roll-backs, other sequences in a slot; read or not in between."""
    states = SequenceStates(4, MAX_LEN, 4, 4)
    counts = TokenCounts(VOCAB_SIZE)
    tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5)
    for step_id in range(1, 12):
        step = worker_pb2.Step(step_id=step_id)
        slot = data.draw(st.integers(0, 3))
        kind = data.draw(st.sampled_from(["draw", "draw", "draw", "replace", "fork", "roll back"]))
        held = np.flatnonzero(states.occupied)
        if kind == "draw" and states.occupied[slot] and states.num_tokens[slot] < MAX_LEN:
            states.token_ids[slot, states.num_tokens[slot]] = data.draw(st.integers(0, VOCAB_SIZE - 1))
            states.num_tokens[slot] += 1
        elif kind == "roll back" and states.num_tokens[slot] > states.num_prompt_tokens[slot]:
            states.num_tokens[slot] -= 1
            states.tenancy[slot] += 1  # as `SequenceStates.roll_back` does
        elif kind == "fork" and held.size and not states.occupied[slot]:
            step.forks_u16 = np.array([held[0], slot], "<u2").tobytes()
            step.fork_indices_u16 = np.array([1], "<u2").tobytes()
            states.apply_blocks(step)
        elif kind == "replace":
            if states.occupied[slot]:
                step.released_slots_u16 = np.array([slot], "<u2").tobytes()
            prompt, generated = data.draw(tokens), data.draw(tokens)
            params = inference_pb2.SamplingParams(seed=1, presence_penalty=data.draw(st.sampled_from([0.0, 1.0])))
            group = step.groups.add(request_id="it", num_prompt_tokens=len(prompt), sampling_params=params)
            group.sequences.add(slot=slot, token_ids=[*prompt, *generated])
            states.apply_blocks(step)
        penalised = np.flatnonzero(states.occupied & states.sampling.is_penalised)
        if not penalised.size or data.draw(st.booleans()):
            continue
        (count_rows,) = counts.rows_of(states, penalised)
        found = counts.counts[count_rows]
        generated_counts, is_in_prompt = found >> 1, found & 1
        for row, each in enumerate(penalised.tolist()):
            history = states.token_ids[each, : states.num_tokens[each]]
            num_prompt = states.num_prompt_tokens[each]
            expected = np.bincount(history[num_prompt:], minlength=VOCAB_SIZE)
            assert generated_counts[row].tolist() == expected.tolist()
            assert is_in_prompt[row].nonzero()[:, 0].tolist() == sorted(set(history[:num_prompt].tolist()))


@pytest.mark.parametrize("on_device", [[0], [0, 1], []])
def test_tokens_that_the_device_alone_knows_are_counted(on_device: list[int]) -> None:
    """Of both sequences, of one beside one whose token the host has, and of none."""
    states = states_of(*[{"prompt": [1, 2], "generated": [3], "presence_penalty": 1.0}] * 2)
    last_tokens = LastTokens("cpu")
    counts, slots = TokenCounts(VOCAB_SIZE, last_tokens), np.array([0, 1])
    counts.rows_of(states, slots)
    last_tokens.put(torch.tensor(slots), torch.tensor([7, 8]))
    states.token_ids[slots, 3] = [UNKNOWN if slot in on_device else 7 + slot for slot in (0, 1)]
    states.num_tokens[slots] += 1
    rows, other = counts.rows_of(states, slots, np.array([5.0]))
    assert other.tolist() == [5.0], "it came along"
    for row, last in zip(rows.tolist(), (7, 8), strict=True):
        assert (counts.counts[row] > 1).nonzero()[:, 0].tolist() == [3, last]


def test_a_row_of_counts_begins_anew_with_another_slot() -> None:
    """Though its sequence is as many tokens long, and the same in number in its slot, as the one counted before."""
    states = states_of({"prompt": [1, 2], "generated": [3], "presence_penalty": 1.0})
    counts = TokenCounts(VOCAB_SIZE)
    counts.rows_of(states, np.array([0]))
    step = worker_pb2.Step(step_id=2, released_slots_u16=np.array([0], "<u2").tobytes())
    for slot, penalty in ((0, 0.0), (1, 1.0)):
        params = inference_pb2.SamplingParams(seed=1, presence_penalty=penalty)
        group = step.groups.add(request_id=f"next {slot}", num_prompt_tokens=2, sampling_params=params)
        group.sequences.add(slot=slot, token_ids=[4, 5, 6])
    states.apply_blocks(step)
    assert counts.rows_of(states, np.array([1]))[0].tolist() == [0] and len(counts.counts) == 1, "a row is given on"
    found = counts.counts[0]
    assert (found > 1).nonzero()[:, 0].tolist() == [6] and (found == 1).nonzero()[:, 0].tolist() == [4, 5]


def test_a_row_of_counts_of_a_released_slot_is_given_on() -> None:
    states = states_of(*[{"prompt": [1, 2], "generated": [3], "presence_penalty": 1.0}] * 2)
    counts = TokenCounts(VOCAB_SIZE)
    counts.rows_of(states, np.array([0]))
    states.apply_blocks(worker_pb2.Step(step_id=2, released_slots_u16=np.array([0], "<u2").tobytes()))
    assert counts.rows_of(states, np.array([1]))[0].tolist() == [0]


def test_rows_of_counts_are_copied_seldom_where_sequences_come_one_by_one() -> None:
    states = states_of(*[{"prompt": [1, 2], "generated": [3 + slot], "presence_penalty": 1.0} for slot in range(6)])
    states.max_num_seqs = 6
    counts, num_rows = TokenCounts(VOCAB_SIZE), []
    for slot in range(6):
        (rows,) = counts.rows_of(states, np.arange(slot + 1))
        num_rows.append(len(counts.counts))
        assert [(counts.counts[row] > 1).nonzero().item() for row in rows] == [3 + each for each in range(slot + 1)]
    assert num_rows == [1, 2, 4, 4, 6, 6], "twice as many, and no more than there are slots"


def test_counts_begin_anew_with_another_lease() -> None:
    """Its mirror counts tenancies from the beginning, so a slot, a number and a length say nothing."""
    counts = TokenCounts(VOCAB_SIZE)
    counts.rows_of(states_of({"prompt": [1, 2], "generated": [3], "presence_penalty": 1.0}), np.array([0]))
    others = [{"prompt": [4, 5], "generated": [6], "presence_penalty": 1.0}] * 3
    (rows,) = counts.rows_of(states_of(*others), np.array([0, 2]))
    assert sorted(rows.tolist()) == [0, 1]
    assert (counts.counts > 1).nonzero().tolist() == [[0, 6], [1, 6]]
    assert (counts.counts == 1).nonzero().tolist() == [[0, 4], [0, 5], [1, 4], [1, 5]]


def test_memory_that_runs_out_for_counts_leaves_each_slot_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 has a sequence without penalties by now, so its row is to be given on, and another one is lacking."""

    def run_out(num_rows: int) -> None:
        raise MemoryError

    states = states_of({"prompt": [1, 2], "generated": [3], "presence_penalty": 1.0})
    counts = TokenCounts(VOCAB_SIZE)
    counts.rows_of(states, np.array([0]))
    step = worker_pb2.Step(step_id=2, released_slots_u16=np.array([0], "<u2").tobytes())
    for slot, penalty in ((0, 0.0), (1, 1.0), (2, 1.0)):
        params = inference_pb2.SamplingParams(seed=1, presence_penalty=penalty)
        group = step.groups.add(request_id=f"next {slot}", num_prompt_tokens=1, sampling_params=params)
        group.sequences.add(slot=slot, token_ids=[4, 5 + slot])
    states.apply_blocks(step)
    with monkeypatch.context() as patch:
        patch.setattr(counts, "_grow", run_out)
        with pytest.raises(MemoryError):
            counts.rows_of(states, np.array([1, 2]))
    assert counts.rows_of(states, np.array([1]))[0].tolist() == [0]
    (rows,) = counts.rows_of(states, np.array([1, 2]))
    assert rows.tolist() == [0, 1] == list(range(len(counts.counts)))
    assert (counts.counts[rows] > 1).nonzero().tolist() == [[0, 6], [1, 7]]


def test_a_forked_slot_is_adjusted_as_its_parent_is() -> None:
    numbers = np.random.default_rng(3)
    sequences = [{**random_sequence(numbers), "allowed_token_ids": list(range(0, 60, 2))} for _ in range(8)]
    states = states_of(*sequences)
    step = worker_pb2.Step(step_id=2, fork_indices_u16=np.ones(8, "<u2").tobytes())
    step.forks_u16 = np.array([(slot, 8 + slot) for slot in range(8)], "<u2").tobytes()
    states.apply_blocks(step)
    logits = logits_of(8).repeat(2, 1)
    adjusted = LogitAdjustments(VOCAB_SIZE).apply(logits, states, np.arange(16))
    assert torch.equal(adjusted[:8], adjusted[8:]) and not torch.equal(adjusted, logits)


def test_bad_words_of_one_sequence_after_another_are_its_own() -> None:
    states = states_of({"prompt": PROMPT, "generated": GENERATED})
    adjustments, logits = LogitAdjustments(VOCAB_SIZE), logits_of(1)
    for number, words in enumerate([[[11, 5, 31], [9, 9, 9, 32]], [[33]], [[5, 34], [35]]] * 3):
        step = worker_pb2.Step(step_id=2 + number, released_slots_u16=np.array([0], "<u2").tobytes())
        params = inference_pb2.SamplingParams(seed=1)
        group = step.groups.add(request_id=str(number), num_prompt_tokens=len(PROMPT), sampling_params=params)
        group.bad_words.extend(inference_pb2.TokenIds(ids=word) for word in words)
        group.sequences.add(slot=0, token_ids=[*PROMPT, *GENERATED])
        states.apply_blocks(step)
        forbidden = adjustments.apply(logits, states, np.array([0]))[0].isneginf().nonzero()[:, 0].tolist()
        assert forbidden == [[31], [33], [34, 35]][number % 3]


def test_in_place_or_in_a_copy_makes_no_difference() -> None:
    numbers = np.random.default_rng(5)
    sequences = [random_sequence(numbers) for _ in range(20)]
    logits, states, slots = logits_of(20), states_of(*sequences), np.arange(20)
    before = logits.clone()
    copied = LogitAdjustments(VOCAB_SIZE).apply(logits, states, slots)
    assert torch.equal(logits, before) and not torch.equal(copied, before)
    assert LogitAdjustments(VOCAB_SIZE).apply(logits, states, slots, keeps_logits=False) is logits
    assert torch.equal(logits, copied)


def test_raw_logits_are_kept_for_a_row_that_is_adjusted_and_wants_their_logprobs() -> None:
    sequence: dict[str, Any] = {"prompt": PROMPT, "generated": GENERATED}
    adjusted_only, wanted_only = sequence | {"presence_penalty": 1.0}, sequence | {"logprobs": 0}
    states = states_of(adjusted_only, wanted_only, sequence | {"logit_bias": {3: 1.0}, "logprobs": 2})
    assert not states.sampling.wants_raw_logits(np.array([0, 1]))
    assert states.sampling.wants_raw_logits(np.array([1, 2]))
