"""The columns of prompt logprobs: for every way to cut prompts into chunks, those of the log-softmax, once each."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2
from tests.worker.fake_model import greedy, slots_u16, u32
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.sampling.prompt_logprobs import PromptLogprobs

VOCAB_SIZE = 23
LOGITS = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3  # by slot and position


def _states(prompts: list[list[int]], num_top: list[int | None]) -> SequenceStates:
    states = SequenceStates(4, 16, 4, 16)
    step = worker_pb2.Step(step_id=1)
    for slot, (prompt, top) in enumerate(zip(prompts, num_top, strict=True)):
        params = greedy() if top is None else greedy(prompt_logprobs=top)
        group = step.groups.add(request_id=str(slot), sampling_params=params, num_prompt_tokens=len(prompt))
        table = range(4 * slot, 4 * slot + 4)
        group.sequences.add(slot=slot, token_ids=prompt, block_table=table)
    states.apply(step)
    return states


def of_all_prompts(*prompts: list[int]) -> PromptLogprobs:
    """Of a step that computes all tokens of prompts, whose logprobs are all wanted."""
    states = _states(list(prompts), [2] * len(prompts))
    rows = worker_pb2.Rows(slots_u16=slots_u16(range(len(prompts))), query_lens_u32=u32(map(len, prompts)))
    rows.num_samples_u16 = slots_u16([0] * len(prompts))
    return PromptLogprobs(states, states.apply_rows(worker_pb2.Step(step_id=2, rows=rows)))


def _compute(states: SequenceStates, lengths: dict[int, int], rows_at_once: int = 3) -> worker_pb2.SequenceOutputs:
    """One step of so many tokens of these slots, none of which draws."""
    rows = worker_pb2.Rows(slots_u16=slots_u16(lengths), query_lens_u32=u32(lengths.values()))
    rows.num_samples_u16 = slots_u16([0] * len(lengths))
    applied = states.apply_rows(worker_pb2.Step(step_id=2, rows=rows))
    of_prompts, outputs = PromptLogprobs(states, applied), worker_pb2.SequenceOutputs()
    if (reader := of_prompts.reader("cpu")) is not None:
        slots = np.repeat(applied.slots, applied.query_lens)
        starts = np.repeat(np.cumsum(applied.query_lens) - applied.query_lens, applied.query_lens)
        positions = np.repeat(applied.context_lens, applied.query_lens) + np.arange(slots.size) - starts
        logits = LOGITS[torch.from_numpy(slots * 16 + positions)]
        for part in reader.rows.split(rows_at_once):
            reader.take(logits[part])
    of_prompts.pack(outputs)
    return outputs


@given(
    st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=15), min_size=1, max_size=4),
    st.lists(st.sampled_from([None, 0, 2, 40, -1]), min_size=4, max_size=4),
    st.data(),
)
def test_the_chunks_of_a_prompt_together_bring_every_token_but_the_first(prompts, num_top, data):
    states, num_top = _states(prompts, num_top[: len(prompts)]), num_top[: len(prompts)]
    found: dict[int, list[tuple[int, float, int, list[int], list[float]]]] = {slot: [] for slot in range(len(prompts))}
    while open_slots := [slot for slot, p in enumerate(prompts) if states.num_computed_tokens[slot] < len(p)]:
        slots = data.draw(st.lists(st.sampled_from(open_slots), min_size=1, unique=True))
        lengths = {
            slot: data.draw(st.integers(1, len(prompts[slot]) - int(states.num_computed_tokens[slot])))
            for slot in slots
        }
        for entry in _compute(states, lengths, data.draw(st.integers(1, 4))).prompt_logprobs:
            slot = slots[entry.row]
            assert entry.first_position == len(found[slot]) + 1
            found[slot] += _read(entry.logprobs)
    for slot, (prompt, top) in enumerate(zip(prompts, num_top, strict=True)):
        assert len(found[slot]) == (0 if top is None else len(prompt) - 1)
        for position, (token_id, logprob, rank, top_ids, top_logprobs) in enumerate(found[slot]):
            expected = torch.log_softmax(LOGITS[slot * 16 + position], -1)
            assert token_id == prompt[position + 1] and abs(logprob - expected[token_id]) < 1e-6
            assert rank == 1 + int((expected > expected[token_id]).sum())
            best = expected.topk(VOCAB_SIZE if top == -1 else min(top or 0, VOCAB_SIZE))
            assert top_ids == best.indices.tolist() and np.allclose(top_logprobs, best.values, rtol=0, atol=1e-6)
            assert logprob == dict(zip(top_ids, top_logprobs, strict=True)).get(token_id, logprob)


def test_what_is_not_finite_is_told_as_it_is_and_spoils_no_other():
    of_prompts = of_all_prompts([1, 2, 3, 4])
    reader, outputs = of_prompts.reader("cpu"), worker_pb2.SequenceOutputs()
    assert reader is not None and reader.rows.tolist() == [0, 1, 2]
    logits = LOGITS[:3].clone()
    logits[1, 5] = torch.nan
    reader.take(logits)
    of_prompts.pack(outputs)
    first, second, third = _read(outputs.prompt_logprobs[0].logprobs)
    assert np.isnan(second[1]) and second[3] == []
    assert [len(entry[3]) for entry in (first, third)] == [2, 2]
    assert third[3] == LOGITS[2].topk(2).indices.tolist()


def _read(columns: worker_pb2.SequenceOutputs) -> list[tuple[int, float, int, list[int], list[float]]]:
    token_ids = np.frombuffer(columns.token_ids_i32, "<i4").tolist()
    counts = np.frombuffer(columns.top_counts_u32, "<u4").tolist() or [0] * len(token_ids)
    ends = np.cumsum(counts)
    top_ids = np.split(np.frombuffer(columns.top_token_ids_i32, "<i4"), ends)
    top_logprobs = np.split(np.frombuffer(columns.top_logprobs_f32, "<f4"), ends)
    return [
        (token_id, logprob, rank, ids.tolist(), values.tolist())
        for token_id, logprob, rank, ids, values in zip(
            token_ids,
            np.frombuffer(columns.logprobs_f32, "<f4").tolist(),
            np.frombuffer(columns.ranks_u32, "<u4").tolist(),
            top_ids,
            top_logprobs,
            strict=False,
        )
    ]
