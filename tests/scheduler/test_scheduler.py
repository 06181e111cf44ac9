"""The scheduler core against the worker's mirror: random traffic, and every invariant after every step."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import worker_pb2
from scheduler_svc.step_encoder import decode, encode
from tests.scheduler.simulation import VOCAB_SIZE, Simulation, expected_tokens

prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)
requests = st.lists(st.tuples(prompts, st.integers(1, 30)), min_size=1, max_size=8)


@given(requests, st.integers(1, 3), st.integers(4, 40), st.integers(16, 30))
@settings(max_examples=150, deadline=None)
def test_every_request_gets_exactly_its_tokens(wanted, depth, budget, num_blocks):
    """Whatever depth, chunk size and cache: each group ends with the tokens that it would get alone."""
    simulation = Simulation(depth=depth, max_num_batched_tokens=budget, num_blocks=num_blocks)
    for prompt, max_tokens in wanted:
        simulation.add(prompt, max_tokens)
    simulation.run_to_end()
    for (prompt, _), group in zip(wanted, simulation.groups, strict=True):
        assert group.sequences[0].token_ids.tolist() == expected_tokens(prompt, group.max_num_tokens)
    simulation.check_nothing_left()


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 30)),
        st.tuples(st.just("send")),
        st.tuples(st.just("answer")),
        st.tuples(st.just("abort"), st.integers(0, 50)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("lose worker")),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=300, deadline=None)
def test_any_order_of_events_keeps_every_invariant(script):
    play(script)


@pytest.mark.chaos
@given(events)
@settings(max_examples=10_000, deadline=None)
def test_any_order_of_events_keeps_every_invariant_for_long(script):
    play(script)


def play(script: list[tuple[Any, ...]]) -> None:
    simulation = Simulation(num_blocks=18)
    aborted = set()
    for event, *arguments in script:
        if event == "add":
            simulation.add(*arguments)
        elif event in ("send", "fail") and len(simulation.in_flight) < simulation.depth:
            simulation.send(fails=event == "fail")
        elif event == "answer" and simulation.in_flight:
            simulation.answer()
        elif event == "abort" and simulation.groups:
            group = simulation.groups[arguments[0] % len(simulation.groups)]
            if not group.is_finished:
                aborted.add(group)
                simulation.abort(group)
        elif event == "lose worker":
            simulation.lose_worker()
        simulation.check()
    simulation.run_to_end()
    for group in simulation.groups:
        tokens = group.sequences[0].token_ids.tolist()
        expected = expected_tokens(tokens[: group.num_prompt_tokens], group.max_num_tokens)
        assert tokens == (expected[: len(tokens)] if group in aborted else expected)
    simulation.check_nothing_left()


def test_nothing_leaks_over_500_requests_with_aborts():
    rng = random.Random(5)
    simulation = Simulation(num_slots=8, num_blocks=40, max_num_batched_tokens=24)
    for _ in range(500):
        simulation.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))], rng.randint(1, 24))
        for _ in range(rng.randint(0, 4)):
            if len(simulation.in_flight) < simulation.depth:
                simulation.send()
            if simulation.in_flight and rng.random() < 0.8:
                simulation.answer()
            simulation.check()
        if rng.random() < 0.3:
            group = rng.choice(simulation.groups)
            if not group.is_finished:
                simulation.abort(group)
    simulation.run_to_end()
    simulation.check_nothing_left()
    assert simulation.num_preempted > 50, "the cache was meant to be too small"


def test_full_metadata_beyond_the_message_limit_is_split_over_steps(monkeypatch):
    """At admission, and when every running sequence is introduced anew after a failed step."""
    monkeypatch.setattr("scheduler_svc.scheduler.MAX_INTRODUCED_TOKENS", 70)
    simulation = Simulation(num_slots=8, num_blocks=200, max_num_batched_tokens=500)
    for number in range(8):
        simulation.add([number] * 30, 20, eos_token_id=None)
    for fails in [False] * 5 + [True]:
        simulation.send(fails)
        simulation.answer()
    simulation.run_to_end()
    told = [sum(len(s.token_ids) for g in step.groups for s in g.sequences) for step in simulation.steps]
    assert max(told) <= 70 and sum(told) > 2 * 8 * 30
    for number, group in enumerate(simulation.groups):
        assert group.sequences[0].token_ids.tolist() == expected_tokens([number] * 30, 50, eos=None)
    simulation.check_nothing_left()


def test_decodes_come_before_prompts_and_prompts_are_chunked():
    simulation = Simulation(num_slots=4, num_blocks=64, max_num_batched_tokens=8, depth=1)
    simulation.add([1, 2], 20, eos_token_id=None)
    simulation.send()
    simulation.answer()
    simulation.add(list(range(30)), 5)
    for _ in range(3):
        simulation.send()
        rows = simulation.sent[-1][0].rows
        assert rows.num_decode_rows == 1
        assert rows.query_lens.tolist() == [1, 7]
        simulation.answer()


def test_first_come_first_served_and_the_youngest_is_preempted():
    simulation = Simulation(num_slots=3, num_blocks=16, depth=1, max_num_batched_tokens=64)
    groups = [simulation.add([number] * 17, 40, eos_token_id=None) for number in range(3)]
    while not groups[2].num_preemptions:
        simulation.send()
        simulation.answer()
    assert [group.num_preemptions for group in groups] == [0, 0, 1]
    simulation.run_to_end()


def test_a_group_that_needs_the_whole_cache_runs():
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=16)
    group = simulation.add([7] * 63, 5, eos_token_id=None)
    simulation.run_to_end()
    assert group.sequences[0].num_tokens == 64


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_length_stop_never_overshoots(depth):
    simulation = Simulation(depth=depth, num_blocks=64)
    simulation.add([5, 6], 6, eos_token_id=None)
    simulation.run_to_end()
    assert sum(int(outputs.rows.num_samples.sum()) for outputs, _ in simulation.sent) == 6


def test_steady_decode_is_a_few_bytes_a_row():
    simulation = Simulation(
        num_slots=256, max_model_len=256, block_size=16, num_blocks=4096, max_num_batched_tokens=8192
    )
    for number in range(256):
        simulation.add([number % VOCAB_SIZE] * 3, 200, eos_token_id=None)
    for _ in range(30):
        simulation.send()
        simulation.answer()
    steady = [
        len(data) / len(outputs.rows)
        for outputs, data in simulation.sent
        if outputs.rows.num_decode_rows == 256 and not len(outputs.appended_slots) and not outputs.introductions
    ]
    assert len(steady) > 20
    answer = np.zeros(256, np.int32).tobytes()  # the answer's only column in a greedy batch
    assert max(steady) + len(answer) / 256 < 8


def test_a_steady_decode_step_does_nothing_sequence_by_sequence():
    """Schedule, encode, apply, record, process: as many calls for 8 sequences as for 256, on both sides of the wire."""
    assert _calls_of_a_steady_step(8) == _calls_of_a_steady_step(256)


def _calls_of_a_steady_step(num_slots: int) -> int:
    """Python and C calls made by one whole step: an object or a loop a sequence would show as more of them."""
    simulation = Simulation(
        num_slots=num_slots, max_model_len=256, block_size=256, num_blocks=512, max_num_batched_tokens=8192, depth=1
    )
    for number in range(num_slots):
        simulation.add([number % VOCAB_SIZE], 200, eos_token_id=None)
    for _ in range(3):
        simulation.send()
        simulation.answer()
    token_ids = np.arange(num_slots, dtype=np.int32)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        outputs = simulation.scheduler.schedule(simulation.waiting, 0)
        assert outputs is not None
        data = encode(outputs, simulation.step_id + 1).SerializeToString()
        applied = simulation.mirror.apply(worker_pb2.Step.FromString(data))
        simulation.mirror.record_samples(applied.rows, token_ids)
        answer = worker_pb2.SequenceOutputs(token_ids_i32=token_ids.tobytes())
        simulation.scheduler.process_outputs(outputs.rows, *decode(answer, outputs.rows.num_samples))
    finally:
        sys.setprofile(None)
    assert len(outputs.rows) == num_slots
    return calls
