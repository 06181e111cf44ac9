"""Samples of a whole step: candidates by a plain sort, and rows of every kind together as each is alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protos import inference_pb2, worker_pb2
from tests.worker.fake_model import slots_u16, u32
from worker_svc.errors import ProtocolError
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.sampling.row_samples import candidates, check_candidates, largest_of_rows, sample_rows
from worker_svc.sampling.sampled import Sampled
from worker_svc.sampling.sequence_outputs import pack_outputs

VOCAB_SIZE = 203
BEAMS = inference_pb2.SamplingParams(seed=1, temperature=0, best_of=4, use_beam_search=True)
RANDOM = inference_pb2.SamplingParams(seed=5, temperature=0.9, top_p=0.9)
WITH_LOGPROBS = inference_pb2.SamplingParams(seed=6, logprobs=3)
CHILDREN = inference_pb2.SamplingParams(seed=7, best_of=3, logprobs=2)


def applied(*asked: tuple[inference_pb2.SamplingParams, int]) -> tuple[SequenceStates, AppliedRows]:
    """One row for each (parameters, samples), each of one token; draws of more than one go to slots of their own."""
    states = SequenceStates(32, 16, 4, 32)
    step = worker_pb2.Step(step_id=1)
    child_slots: list[int] = []
    next_slot = len(asked)
    for slot, (params, num_samples) in enumerate(asked):
        group = step.groups.add(request_id=f"request-{slot}", sampling_params=params)
        group.sequences.add(slot=slot, token_ids=[slot + 1], block_table=[slot])
        if num_samples > 1 and not params.use_beam_search:
            children = range(next_slot, next_slot + num_samples - 1)
            for index, child in enumerate(children, start=1):
                group.sequences.add(slot=child, index=index, same_as_slot=slot)
            child_slots += [slot, *children]
            next_slot += num_samples - 1
    step.rows.slots_u16 = slots_u16(range(len(asked)))
    step.rows.query_lens_u32 = u32([1] * len(asked))
    step.rows.num_samples_u16 = slots_u16(num_samples for _, num_samples in asked)
    step.rows.child_slots_u16 = slots_u16(child_slots)
    return states, states.apply(step).rows


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def answer(logits: torch.Tensor, *asked: tuple[inference_pb2.SamplingParams, int]) -> worker_pb2.SequenceOutputs:
    states, rows = applied(*asked)
    sampled = sample_rows(logits, states.sampling, rows)
    states.record_samples(rows, sampled.token_ids)
    states.check_integrity()
    return pack_outputs(rows, sampled)


def ranked(logits: torch.Tensor, counts: list[int]) -> Sampled:
    found = candidates(logits, np.array(counts))
    return found.on_host(tuple(tensor.numpy() for tensor in found.tensors))


def i32(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def f32(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


def u32s(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


def test_candidates_are_the_most_likely_tokens_of_every_row() -> None:
    logits = logits_of(5)
    counts = [8, 1, 203, 4, 16]
    found = ranked(logits, counts)
    assert found.logprobs is not None and found.bad_rows.size == 0
    exact = torch.log_softmax(logits.double(), dim=-1).numpy()
    start = 0
    for row, count in enumerate(counts):
        best = np.argsort(-exact[row], kind="stable")[:count]
        assert found.token_ids[start : start + count].tolist() == best.tolist()
        assert np.abs(found.logprobs.drawn[start : start + count] - exact[row, best]).max() < 1e-5
        assert found.logprobs.ranks[start : start + count].tolist() == list(range(1, count + 1))
        start += count
    assert start == found.token_ids.size


def test_equal_candidates_are_named_by_token_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 2.0, 5.0, 2.0], [4.0] * 7, [-torch.inf] * 5 + [3.0, 3.0]])
    found = ranked(logits, [5, 4, 3])
    assert found.token_ids.tolist() == [1, 3, 5, 2, 4, 0, 1, 2, 3, 5, 6, 0]


def test_temperature_and_filters_do_not_change_candidates() -> None:
    params = inference_pb2.SamplingParams()
    params.CopyFrom(BEAMS)
    params.temperature, params.top_k, params.top_p = 0.5, 2, 0.1
    logits = logits_of(1)
    assert answer(logits, (params, 8)) == answer(logits, (BEAMS, 8))


MIXED: list[tuple[inference_pb2.SamplingParams, int]] = [
    (RANDOM, 1),
    (BEAMS, 8),
    (WITH_LOGPROBS, 1),
    (RANDOM, 1),
    (CHILDREN, 3),
    (BEAMS, 4),
    (RANDOM, 3),
]


def test_rows_of_every_kind_answer_together_what_each_answers_alone() -> None:
    logits = logits_of(len(MIXED))
    together = answer(logits, *MIXED)
    alone = [answer(logits[row : row + 1], asked) for row, asked in enumerate(MIXED)]
    assert i32(together.token_ids_i32) == [token for one in alone for token in i32(one.token_ids_i32)]
    assert len(set(i32(alone[4].token_ids_i32))) > 1, "children that draw the same show nothing"
    logprobs, ranks, counts = [], [], []
    for one, (_, num_samples) in zip(alone, MIXED, strict=True):
        logprobs += f32(one.logprobs_f32) or [0.0] * num_samples
        ranks += u32s(one.ranks_u32) or [0] * num_samples
        counts += u32s(one.top_counts_u32) or [0] * num_samples
    assert f32(together.logprobs_f32) == logprobs and u32s(together.ranks_u32) == ranks
    assert u32s(together.top_counts_u32) == counts
    assert i32(together.top_token_ids_i32) == [token for one in alone for token in i32(one.top_token_ids_i32)]
    assert f32(together.top_logprobs_f32) == [value for one in alone for value in f32(one.top_logprobs_f32)]
    assert not together.num_tokens_u16 and not together.row_errors


GREEDY = inference_pb2.SamplingParams(seed=8, temperature=0)


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1, 1), (1, 0, 3, 1), (2,), (0, 1)])
def test_rows_that_take_the_largest_answer_what_they_answer_among_others(counts: tuple[int, ...]) -> None:
    states, rows = applied(*((GREEDY, count) for count in counts))
    assert states.sampling.takes_largest[rows.sample_slots].all()
    logits = logits_of(sum(count > 0 for count in counts), seed=4)
    logits[0, 7] = logits[0, 90] = 20.0
    if len(logits) > 1:
        logits[1, 5] = torch.nan
    expected, found = sample_rows(logits, states.sampling, rows), largest_of_rows(logits, rows)
    sampled = found.on_host(tuple(tensor.numpy() for tensor in found.tensors))
    assert sampled.token_ids.tolist() == expected.token_ids.tolist() and sampled.token_ids[0] == 7
    assert sampled.bad_rows.tolist() == expected.bad_rows.tolist() == [1][: len(logits) - 1]
    assert pack_outputs(rows, sampled) == pack_outputs(rows, expected)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.1},
        {"logprobs": 0},
        {"use_beam_search": True},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"allowed_token_ids": [1]},
        {"logit_bias": {3: 1.0}},
    ],
)
def test_who_asks_for_more_does_not_take_the_largest(more: dict[str, Any]) -> None:
    params = inference_pb2.SamplingParams()
    params.CopyFrom(GREEDY)
    params.MergeFrom(inference_pb2.SamplingParams(**more))
    states, _ = applied((params, 1), (GREEDY, 1))
    assert states.sampling.takes_largest[:3].tolist() == [False, True, False]


def test_logprobs_of_several_samples_of_a_row() -> None:
    logits = logits_of(1, seed=3)
    outputs = answer(logits, (CHILDREN, 3))
    exact = torch.log_softmax(logits.double(), dim=-1)[0].numpy()
    tokens = i32(outputs.token_ids_i32)
    assert np.abs(np.array(f32(outputs.logprobs_f32)) - exact[tokens]).max() < 1e-5
    assert u32s(outputs.ranks_u32) == [1 + int((exact > exact[token]).sum()) for token in tokens]
    assert u32s(outputs.top_counts_u32) == [2, 2, 2]
    assert i32(outputs.top_token_ids_i32) == np.argsort(-exact)[:2].tolist() * 3


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_row_without_finite_maximum_answers_an_error_and_no_token(bad: int) -> None:
    logits = logits_of(len(MIXED))
    good = answer(logits, *MIXED)
    logits[bad, 3] = torch.nan
    mixed = answer(logits, *MIXED)
    samples = [num_samples for _, num_samples in MIXED]
    left = [0 if row == bad else num_samples for row, num_samples in enumerate(samples)]
    assert np.frombuffer(mixed.num_tokens_u16, "<u2").tolist() == left
    assert [error.row for error in mixed.row_errors] == [bad]
    first, end = sum(samples[:bad]), sum(samples[: bad + 1])

    def without(values: list[Any]) -> list[Any]:
        return values[:first] + values[end:]

    assert i32(mixed.token_ids_i32) == without(i32(good.token_ids_i32))
    assert f32(mixed.logprobs_f32) == without(f32(good.logprobs_f32))
    assert u32s(mixed.top_counts_u32) == without(u32s(good.top_counts_u32))
    assert len(i32(mixed.top_token_ids_i32)) == sum(u32s(mixed.top_counts_u32))


def test_more_candidates_than_tokens_are_refused() -> None:
    _, rows = applied((BEAMS, 204), (BEAMS, 2))
    with pytest.raises(ProtocolError, match="204 candidates asked for, of a vocabulary of 203"):
        check_candidates(rows, VOCAB_SIZE)
    check_candidates(rows, 204)
    check_candidates(applied((GREEDY, 1))[1], 1)
