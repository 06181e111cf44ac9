"""The scheduler core against the worker's mirror: random traffic, no sockets, invariants after every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2, worker_pb2
from scheduler_svc.block_manager import BlockSpaceManager
from scheduler_svc.policy import POLICIES
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.sequence_columns import SequenceColumns
from scheduler_svc.step_encoder import encode
from scheduler_svc.step_plan import ScheduledRows
from scheduler_svc.waiting_queue import WaitingQueue
from worker_svc.sequence_states import SequenceStates

VOCAB_SIZE, EOS = 97, 3


def next_token(history: np.ndarray) -> int:
    """What the fake model says: a function of all tokens so far, so that a lost or doubled token changes the rest."""
    state = 17
    for token in history.tolist():
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(prompt: list[int], max_num_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_num_tokens:
        tokens.append(next_token(np.array(tokens)))
        if tokens[-1] == EOS:
            break
    return tokens


@dataclass
class Simulation:
    """One scheduler and one mirror with a fake model between them, `depth` steps in flight."""

    num_slots: int = 4
    max_model_len: int = 64
    block_size: int = 4
    num_blocks: int = 24
    max_num_batched_tokens: int = 16
    depth: int = 2
    step_id: int = 0
    in_flight: deque = field(default_factory=deque)
    failed_step: int | None = None
    num_preempted: int = 0
    wire_bytes: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.columns = SequenceColumns(self.num_slots, self.max_model_len, self.block_size)
        self.blocks = BlockSpaceManager(self.columns, self.num_blocks)
        self.waiting = WaitingQueue(POLICIES["fcfs"])
        self.scheduler = Scheduler(self.columns, self.blocks, self.max_num_batched_tokens, POLICIES["fcfs"])
        self.mirror = SequenceStates(self.num_slots, self.max_model_len, self.block_size, self.num_blocks)
        self.groups: list[SequenceGroup] = []

    def add(self, prompt: list[int], max_tokens: int) -> SequenceGroup:
        group = SequenceGroup(
            f"request-{len(self.groups)}",
            prompt,
            inference_pb2.SamplingParams(seed=1),
            max_num_tokens=min(len(prompt) + max_tokens, self.max_model_len),
            arrival_ns=0,
            eos_token_id=EOS,
        )
        self.groups.append(group)
        self.waiting.push(group)
        return group

    def abort(self, group: SequenceGroup) -> None:
        if self.waiting.remove(group):
            for sequence in group.sequences:
                sequence.status = SequenceStatus.FINISHED
        else:
            self.scheduler.abort(group)

    def send(self, fail: bool = False) -> bool:
        """Schedules one step; the fake worker runs it at once, the answer waits in `in_flight`."""
        resume_after = None
        if self.failed_step is not None:
            if self.in_flight:
                return False
            resume_after, self.failed_step = self.failed_step, None
        outputs = self.scheduler.schedule(self.waiting, now_ns=0)
        if outputs is None:
            self.failed_step = resume_after
            return False
        self.step_id += 1
        self.num_preempted += outputs.num_preempted
        step = encode(outputs, self.step_id, resume_after)
        data = step.SerializeToString()
        self.wire_bytes.append((len(data), len(outputs.rows), outputs))
        self.in_flight.append((outputs.rows, *self.run(worker_pb2.Step.FromString(data), fail)))
        return True

    def run(self, step: worker_pb2.Step, fail: bool) -> tuple[str, np.ndarray | None]:
        if self.failing and not step.HasField("resume_after"):
            return "skipped", None
        self.failing = fail
        self.mirror.apply_blocks(step)
        rows = self.mirror.apply_rows(step)
        if fail:
            self.mirror.roll_back(rows)
            return "failed", None
        tokens = [next_token(self.mirror.token_ids[slot, : self.mirror.num_tokens[slot]]) for slot in rows.sample_slots]
        self.mirror.record_samples(rows, np.array(tokens, np.int64))
        self.mirror.check_integrity()
        return "ok", np.array(tokens, np.int32)

    failing: bool = False

    def answer(self) -> None:
        rows, status, tokens = self.in_flight.popleft()
        if status == "ok":
            self.scheduler.process_outputs(rows, tokens, rows.num_samples, {})
            return
        self.scheduler.roll_back(rows)
        if status == "failed":
            self.failed_rows: ScheduledRows = rows
            self.failed_step = self.step_id - len(self.in_flight)
        if not self.in_flight:
            self.scheduler.resume(self.failed_rows)

    def check(self) -> None:
        self.scheduler.check_integrity()
        if self.failed_step is None and not self.failing and not self.in_flight and not self.scheduler._released_slots:
            self.check_mirror()

    def check_mirror(self) -> None:
        """With nothing in flight the mirror is the scheduler's columns."""
        columns, mirror = self.columns, self.mirror
        assert (columns.occupied == mirror.occupied).all()
        for slot in np.flatnonzero(columns.occupied):
            assert columns.num_tokens[slot] == mirror.num_tokens[slot]
            assert columns.num_computed_tokens[slot] == mirror.num_computed_tokens[slot]
            length, blocks = columns.num_tokens[slot], columns.num_blocks[slot]
            assert (columns.token_ids[slot, :length] == mirror.token_ids[slot, :length]).all()
            assert blocks == mirror.num_blocks[slot]
            assert (columns.block_tables[slot, :blocks] == mirror.block_tables[slot, :blocks]).all()

    def run_to_end(self) -> None:
        idle = 0
        while any(not group.is_finished for group in self.groups):
            progressed = False
            while len(self.in_flight) < self.depth and self.send():
                progressed = True
            if self.in_flight:
                self.answer()
                progressed = True
            self.check()
            idle = 0 if progressed else idle + 1
            assert idle < 2, "runnable work, nothing in flight, and nothing was scheduled"
        while self.in_flight:
            self.answer()


def assert_nothing_left(simulation: Simulation) -> None:
    assert simulation.columns.num_free_slots == simulation.num_slots
    assert simulation.blocks.num_free_blocks == simulation.num_blocks
    assert not simulation.scheduler.running and not simulation.scheduler.preempted and not len(simulation.waiting)
    simulation.scheduler.check_integrity()


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
    assert_nothing_left(simulation)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 30)),
        st.tuples(st.just("send")),
        st.tuples(st.just("answer")),
        st.tuples(st.just("abort"), st.integers(0, 50)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("lose")),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=250, deadline=None)
def test_any_order_of_events_keeps_every_invariant(events):
    simulation = Simulation(num_blocks=18)
    aborted = set()
    for event, *arguments in events:
        if event == "add":
            simulation.add(*arguments)
        elif event in ("send", "fail") and len(simulation.in_flight) < simulation.depth:
            simulation.send(fail=event == "fail")
        elif event == "answer" and simulation.in_flight:
            simulation.answer()
        elif event == "abort" and simulation.groups:
            group = simulation.groups[arguments[0] % len(simulation.groups)]
            if not group.is_finished:
                aborted.add(group)
            simulation.abort(group)
        elif event == "lose":
            lose_worker(simulation)
        simulation.check()
    simulation.run_to_end()
    for group in simulation.groups:
        prompt = group.sequences[0].token_ids[: group.num_prompt_tokens].tolist()
        expected = expected_tokens(prompt, group.max_num_tokens)
        tokens = group.sequences[0].token_ids.tolist()
        assert tokens == (expected[: len(tokens)] if group in aborted else expected)
    assert_nothing_left(simulation)


def lose_worker(simulation: Simulation) -> None:
    """The worker dies and an empty one takes its place: groups keep what was answered, nothing else."""
    for group in simulation.scheduler.evacuate():
        simulation.waiting.push(group)
    simulation.scheduler.check_integrity()
    simulation.in_flight.clear()
    groups = simulation.groups
    simulation.failing, simulation.failed_step = False, None
    simulation.__post_init__.__func__  # a fresh scheduler and mirror below; queue and groups stay
    waiting = simulation.waiting
    simulation.__post_init__()
    simulation.waiting, simulation.groups = waiting, groups


def test_steady_decode_is_a_few_bytes_a_row():
    simulation = Simulation(num_slots=256, max_model_len=256, block_size=16, num_blocks=4096, max_num_batched_tokens=8192)
    for start in range(256):
        simulation.add([start % VOCAB_SIZE] * (1 + start % 5), 200)
    simulation.groups and [setattr(group, "eos_token_id", None) for group in simulation.groups]
    for _ in range(40):
        simulation.send()
        simulation.answer()
    steady = [
        size / rows
        for size, rows, outputs in simulation.wire_bytes
        if rows == 256 and not len(outputs.appended_slots) and not outputs.introductions
    ]
    assert len(steady) > 5
    answer_bytes = 4  # one i32 token a row; the columns have no other entry
    assert max(steady) + answer_bytes < 8
