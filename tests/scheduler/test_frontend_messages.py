"""What passes between the core and its frontends, there and back: nothing may be lost on the way."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import frontend_pb2, worker_pb2
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.errors import (
    DuplicateRequest,
    FieldViolation,
    InvalidRequest,
    NameTaken,
    NotReady,
    QueueFull,
    UnknownName,
    Unsupported,
)
from scheduler_svc.frontends.frontend_messages import (
    apply_counters,
    decode_beams,
    decode_refusal,
    decode_tokens,
    encode_beams,
    encode_counters,
    encode_refusal,
    encode_tokens,
)
from scheduler_svc.frontends.outbox import MAX_BATCH_BYTES, Outbox
from scheduler_svc.frontends.prepared_group import decode_group, encode_group
from scheduler_svc.limits.over_limit import OverLimit
from scheduler_svc.models.model_description import decode_model, encode_model
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.requests.group_limits import new_beam_search
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer


def over_the_wire(group: SequenceGroup) -> SequenceGroup:
    message = encode_group(group, 7, reads_logprobs=True, replaces=True)
    again = frontend_pb2.PreparedGroup.FromString(message.SerializeToString())
    assert (again.number, again.reads_logprobs, again.replaces) == (7, True, True)
    return decode_group(again, vocab_size=400)


def state_of(group: SequenceGroup) -> dict[str, object]:
    """Everything that a group holds, in values that can be compared."""
    others = ("sequences", "beam_search", "output", "number")  # the last is this process's own
    state = {name: value for name, value in vars(group).items() if name not in others}
    search = group.beam_search
    return {
        **state,
        # As text, for numpy arrays do not compare.
        "beam_search": None if search is None else str(vars(search) | {"_lines": search._lines.before}),
        "sequences": [(each.index, each.status, each.token_ids.tolist()) for each in group.sequences],
    }


@pytest.mark.parametrize("eos_token_id", [None, 0, 258])
def test_a_group_is_the_same_on_the_other_side(eos_token_id):
    group = SequenceGroup(
        "an id",
        [1, 2, 3, 70_000],
        pb.SamplingParams(n=2, best_of=3, temperature=0.5, stop=["x"], seed=2**64 - 1),
        max_num_tokens=44,
        arrival_ns=12345678901234567,
        eos_token_id=eos_token_id,
        stop_token_ids=frozenset({5, 6}),
        num_outputs=2,
        best_of=3,
        priority=-4,
        tenant="t",
        adapter="a",
        cache_salt="s",
    )
    assert state_of(over_the_wire(group)) == state_of(group)


@pytest.mark.parametrize("resumed", [[[3, 4], [], [5]], [[], [], []]])
def test_resumed_sequences_go_on_where_they_were(resumed):
    group = SequenceGroup(
        "r",
        [1, 2],
        pb.SamplingParams(n=3),
        max_num_tokens=9,
        arrival_ns=0,
        num_outputs=3,
        resumed_token_ids=resumed,
    )
    group.sequences[2].status = SequenceStatus.FINISHED
    again = over_the_wire(group)
    assert state_of(again) == state_of(group)
    assert [sequence.index for sequence in again.unfinished()] == [0, 1]


def test_a_group_of_beams_has_its_search():
    params = pb.SamplingParams(
        use_beam_search=True, best_of=4, n=2, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_YES
    )
    search = new_beam_search(params, 2, 9, frozenset({5, 258}), 400)
    group = SequenceGroup(
        "b",
        [1, 2],
        params,
        max_num_tokens=9,
        arrival_ns=0,
        eos_token_id=258,
        stop_token_ids=frozenset({5}),
        num_outputs=2,
        best_of=4,
        beam_search=search,
    )
    assert state_of(over_the_wire(group)) == state_of(group)


def test_tokens_of_groups_that_are_gone_are_left_out():
    groups = {
        number: SequenceGroup("g", [1], pb.SamplingParams(), max_num_tokens=9, arrival_ns=0, best_of=2)
        for number in (3, 4, 5)
    }
    sequences = np.array([groups[5].sequences[1], groups[3].sequences[0], groups[4].sequences[1]], object)
    tokens = NewTokens(
        sequences, np.array([70_000, 11, 12], np.int32), np.array([8, 2, 9]), np.array([0, 1, 2], np.uint8)
    )
    columns = encode_tokens([5, 3, 4], tokens, np.arange(3), None)
    del groups[3]
    again = decode_tokens(columns, groups)
    assert again.sequences.tolist() == [groups[5].sequences[1], groups[4].sequences[1]]
    assert again.token_ids.tolist() == [70_000, 12] and again.finish_reasons.tolist() == [0, 2]
    assert again.entries.tolist() == [0, 2]


def test_counters_reach_the_other_side():
    one, other = (SequenceGroup("g", [1], pb.SamplingParams(), max_num_tokens=9, arrival_ns=0) for _ in range(2))
    one.first_scheduled_ns, one.num_cached_tokens, one.num_preemptions, one.num_moves = 77, 16, 2, 1
    apply_counters(encode_counters(3, one), other)
    assert state_of(one) == state_of(other)


def test_hypotheses_come_back_to_the_bit():
    hypotheses = [
        BeamHypothesis([4, 5], -0.1, -1 / 3, FinishReason.STOP, [-0.25, -1 / 12], [1, 2]),
        BeamHypothesis([6], float(np.float32(-0.7)), -0.7, FinishReason.LENGTH, [-0.7], []),
    ]
    group = SequenceGroup("g", [1], pb.SamplingParams(), max_num_tokens=9, arrival_ns=0)
    assert decode_beams(encode_beams(1, group, hypotheses)) == hypotheses


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest(FieldViolation("a", "got 1; accepted: 2"), FieldViolation("b", "none")),
        InvalidRequest(FieldViolation("prompt", "too many"), is_too_long=True),
        Unsupported("not here"),
        UnknownName("who"),
        DuplicateRequest("twice"),
        QueueFull("full", 1.5),
        OverLimit("over", 2.5, tenant="a", limit="bytes", most=10, left=3, label="others"),
        NotReady("soon"),
        NameTaken("taken"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_refusal_is_the_same_on_the_other_side(refusal):
    again = decode_refusal(encode_refusal(3, refusal))
    assert type(again) is type(refusal) and str(again) == str(refusal) and vars(again) == vars(refusal)


def test_a_fault_of_the_core_is_told_without_its_words():
    refused = encode_refusal(3, ValueError("secret"))
    assert "secret" not in str(refused) and isinstance(decode_refusal(refused), RuntimeError)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_selected_logprobs_are_those_of_their_entries(counts, data):
    num_entries, num_top = len(counts), sum(counts)
    outputs = worker_pb2.SequenceOutputs(
        token_ids_i32=np.arange(num_entries, dtype="<i4").tobytes(),
        logprobs_f32=(-np.arange(num_entries, dtype="<f4")).tobytes(),
        ranks_u32=np.arange(100, 100 + num_entries, dtype="<u4").tobytes(),
        top_counts_u32=np.array(counts, "<u4").tobytes(),
        top_token_ids_i32=np.arange(num_top, dtype="<i4").tobytes(),
        top_logprobs_f32=(-np.arange(num_top, dtype="<f4") / 2).tobytes(),
    )
    entries = data.draw(st.lists(st.integers(0, num_entries - 1), min_size=1, max_size=10))
    columns = LogprobColumns(outputs)
    selected = LogprobColumns(columns.select(np.array(entries)))
    for place, entry in enumerate(entries):
        assert selected.at(place, 9, str) == columns.at(entry, 9, str)


def test_the_model_and_its_tokenizer_arrive(tmp_path):
    (tmp_path / "given").mkdir()
    write_byte_tokenizer(tmp_path / "given", 400)
    model = ServedModel(
        name="m",
        fingerprint="f" * 32,
        model_hash="h",
        architecture="A",
        dtype="float32",
        kv_cache_dtype="bfloat16",
        quantization="int8",
        vocab_size=400,
        max_model_len=1,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        max_cached_tokens=2**40,
        block_size=5,
        max_logprobs=6,
        eos_token_ids=(7, 8),
        tokenizer=Tokenizer.from_folder(tmp_path / "given"),
        tokenizer_sha256="t",
    )
    model.tokenizer.save(tmp_path / "saved")
    again = decode_model(encode_model(model, tmp_path / "saved"))
    assert again == dataclasses.replace(model, tokenizer=again.tokenizer)
    assert again.tokenizer.encode("Grüße") == model.tokenizer.encode("Grüße")


async def test_an_outbox_gives_what_has_come_together_and_in_order():
    box: Outbox[frontend_pb2.FrontendEvent] = Outbox()
    batches: list[list[int]] = []

    async def read() -> None:
        async for events in box.batches():
            batches.append([event.closed.number for event in events])

    def put(*numbers: int) -> None:
        for number in numbers:
            box.put(frontend_pb2.FrontendEvent(closed=frontend_pb2.GroupClosed(number=number)))

    put(1, 2)
    reading = asyncio.create_task(read())
    while not batches:
        await asyncio.sleep(0)
    put(3, 4)
    box.close()
    put(5)
    await asyncio.wait_for(reading, 5)
    assert batches == [[1, 2], [3, 4]], "nothing is taken once it is closed"


async def test_a_batch_of_an_outbox_is_no_larger_than_a_message_may_be():
    box: Outbox[frontend_pb2.FrontendEvent] = Outbox()
    for _ in range(6):
        prompt = bytes(MAX_BATCH_BYTES // 2)
        box.put(frontend_pb2.FrontendEvent(group=frontend_pb2.PreparedGroup(prompt_token_ids_i32=prompt)))
    box.close()
    sizes = [len(events) async for events in box.batches()]
    assert sum(sizes) == 6 and max(sizes) <= 2
