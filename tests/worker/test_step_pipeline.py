"""Steps on their way together: what is answered, in which order, and what is left where one of them fails."""

from __future__ import annotations

import queue
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2, worker_pb2
from tests.worker.fake_model import FakeModel, decode, fake_config, greedy, next_token, prefill, slots_u16, tokens_of
from tests.worker.late_outputs import Arrivals, LateOutputs
from tests.worker.replayed_graphs import ReplayedGraphs
from worker_svc.cache.cached_blocks import CachedBlocks
from worker_svc.host.output_copies import HostOutputs, OutputCopies
from worker_svc.mirror.sequence_states import UNKNOWN, SequenceStates
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.stage_answers import StageAnswers
from worker_svc.steps.step_pipeline import StepPipeline
from worker_svc.steps.step_timer import StepTimer

BLOCK_SIZE, MAX_SEQS, MAX_LEN = 4, 6, 64
MAX_BLOCKS = MAX_LEN // BLOCK_SIZE


class Pipeline:
    """One over a fake model, with everything that it says kept."""

    def __init__(
        self,
        outputs: OutputCopies | None = None,
        *,
        has_graphs: bool = False,
        model: FakeModel | None = None,
        answers: StageAnswers | None = None,
    ) -> None:
        self.model = model or FakeModel()
        self.outputs = LateOutputs()
        self.arrivals = Arrivals()
        self.calls: list[str] = []
        self.results: list[worker_pb2.StepResult] = []
        self.states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, MAX_SEQS * MAX_BLOCKS)
        self.cached = CachedBlocks(MAX_SEQS * MAX_BLOCKS)
        backend = ReplayedGraphs if has_graphs else None
        runner = ModelRunner(
            self.model,
            fake_config(),
            BLOCK_SIZE,
            outputs=outputs or self.outputs,
            graph_backend=backend,
            answers=answers,
        )
        runner.allocate_cache(MAX_SEQS * MAX_BLOCKS, 0)
        runner.capture_graphs(MAX_SEQS, MAX_LEN, 0)
        self.pipeline = StepPipeline(
            runner,
            self.states,
            64,
            self.arrivals.when_here,
            lambda: self.calls.append("give back"),
            lambda: self.calls.append("end"),
            self.cached,
        )

    def take(self, *steps: worker_pb2.Step) -> None:
        for step in steps:
            self.pipeline.take(step, StepTimer(time.perf_counter_ns()), self.results.append)

    @property
    def answered(self) -> list[tuple[int, int]]:
        return [(result.step_id, result.status) for result in self.results]


OK, FAILED, SKIPPED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_SKIPPED


def successors(token: int, position: int, count: int) -> list[int]:
    found = []
    for place in range(position, position + count):
        token = next_token(token, place)
        found.append(token)
    return found


def test_a_step_is_launched_before_the_outputs_of_those_before_it_are_here() -> None:
    late = Pipeline()
    late.take(prefill(1, [[3, 4, 5], [9]]), decode(2, [0, 1]), decode(3, [1]), decode(4, [0, 1]))
    assert late.model.num_forwards == 4 and late.results == []
    assert not any(copy.is_here for copy in late.outputs.copies)
    assert late.states.token_ids[0, 3] == late.states.token_ids[0, 4] == UNKNOWN
    late.arrivals.arrive(2)
    assert late.answered == [(1, OK), (2, OK)]
    late.arrivals.arrive()
    zero, one = successors(5, 2, 3), successors(9, 0, 4)
    assert [tokens_of(result) for result in late.results] == [
        [zero[0], one[0]],
        [zero[1], one[1]],
        [one[2]],
        [zero[2], one[3]],
    ]
    assert late.states.token_ids[1, :5].tolist() == [9, *one]
    late.states.check_integrity()


def test_what_is_told_of_blocks_waits_for_outputs_and_ends_with_a_step_that_fails() -> None:
    """Steps behind the failed one have been launched, and have written: nothing of theirs counts."""
    late = Pipeline()
    steps = [prefill(1, [[3, 4, 5, 6, 7], [9]]), decode(2, [0, 1]), decode(3, [0, 1])]
    for block, step in zip((0, 4, 5), steps, strict=True):
        step.cached_blocks.block_ids_u32 = np.array([block], "<u4").tobytes()
        step.cached_blocks.hashes = bytes([block]) * 32
    late.take(*steps)
    late.arrivals.arrive(1)
    late.outputs.copies[1].error = RuntimeError("the device says no")
    late.arrivals.arrive()
    assert late.answered == [(1, OK), (2, FAILED), (3, SKIPPED)]
    told = late.cached.told()
    assert np.frombuffer(told.block_ids_u32, "<u4").tolist() == [0] and told.hashes == bytes(32)


def test_running_is_the_step_whose_answer_is_due() -> None:
    late = Pipeline()
    assert late.pipeline.running == (0, 0)
    late.take(prefill(1, [[3]]), decode(2, [0]))
    step_id, age_ns = late.pipeline.running
    assert step_id == 1 and late.pipeline.running[1] > age_ns > 0
    late.arrivals.arrive(1)
    assert late.pipeline.running[0] == 2
    late.pipeline.settle()
    assert late.pipeline.running == (0, 0) and late.answered == [(1, OK), (2, OK)]
    late.arrivals.arrive()  # of what has been answered meanwhile
    assert len(late.results) == 2


def test_tokens_that_come_late_do_not_enter_the_history_of_a_slots_next_sequence() -> None:
    late = Pipeline()
    late.take(prefill(1, [[3, 4]]))
    other = prefill(2, [[7, 8, 9, 10]])
    other.released_slots_u16 = slots_u16([0])
    late.take(other)
    late.arrivals.arrive()
    assert late.states.token_ids[0, :5].tolist() == [7, 8, 9, 10, next_token(10, 3)]
    assert tokens_of(late.results[0]) == [next_token(4, 1)]


def forking(step_id: int) -> worker_pb2.Step:
    """Slot 1 becomes what slot 0 is."""
    step = worker_pb2.Step(step_id=step_id, forks_u16=slots_u16([0, 1]), fork_indices_u16=slots_u16([1]))
    table = step.block_tables.add().replace
    table.slots_u16, table.block_ids_u32 = slots_u16([1]), np.array([MAX_BLOCKS], "<u4").tobytes()
    return step


def bringing_children(step_id: int) -> worker_pb2.Step:
    """A prompt of slot 2, from which slots 2 and 3 draw."""
    step = prefill(step_id, [[3]])
    step.groups[0].request_id = "parent"
    step.groups[0].sequences[0].slot = 2
    step.groups[0].sequences.add(slot=3, index=1, same_as_slot=2)
    step.rows.slots_u16, step.rows.num_samples_u16 = slots_u16([2]), slots_u16([2])
    step.rows.child_slots_u16 = slots_u16([2, 3])
    return step


@pytest.mark.parametrize(
    ("bad_word", "steps"),
    [
        ([], [forking(2), decode(3, [0, 1])]),
        ([], [bringing_children(2), decode(3, [2, 3])]),
        (successors(3, 0, 2), [decode(2, [0])]),
    ],
    ids=["fork", "children", "bad words"],
)
def test_a_step_that_needs_a_history_waits_for_it(bad_word: list[int], steps: list[worker_pb2.Step]) -> None:
    first = prefill(1, [[3]])
    first.groups[0].bad_words.add(ids=bad_word)
    plain, late = Pipeline(HostOutputs()), Pipeline()
    for pipeline in (plain, late):
        pipeline.take(first, *steps)
    assert late.answered[0] == (1, OK), "before its outputs were said to be here"
    late.pipeline.settle()
    assert [result.outputs for result in late.results] == [result.outputs for result in plain.results]
    if bad_word:
        assert tokens_of(late.results[1]) != bad_word[1:], "it was found"


def test_penalties_count_tokens_that_only_the_device_knows() -> None:
    params = greedy(presence_penalty=9.0)
    steps = [prefill(1, [[3], [4]], params=params), *(decode(step_id, [0, 1]) for step_id in range(2, 7))]
    plain, late = Pipeline(HostOutputs()), Pipeline()
    for pipeline in (plain, late):
        pipeline.take(*steps)
    assert late.results == [], "nothing was waited for"
    late.pipeline.settle()
    answers = [tokens_of(result) for result in late.results]
    assert answers == [tokens_of(result) for result in plain.results]
    assert [answer[0] for answer in answers] != successors(3, 0, 6), "the penalty tells"


# ---- Failures -------------------------------------------------------------------------------------------------------


def test_a_launch_that_fails_is_answered_after_the_steps_before_it() -> None:
    late = Pipeline()
    late.take(prefill(1, [[3]]), decode(2, [0]))
    late.model.error = torch.OutOfMemoryError("CUDA out of memory\nand more")
    late.take(decode(3, [0]), decode(4, [0]))
    assert late.answered == [(1, OK), (2, OK), (3, FAILED), (4, SKIPPED)]
    error = late.results[2].error
    assert error.code == worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY and error.block_operations_applied
    assert error.message == "OutOfMemoryError: CUDA out of memory"
    assert late.calls == ["give back"]
    assert late.states.num_tokens[0] == 3 and late.states.num_computed_tokens[0] == 2
    _resumes(late, failed=3, next_id=5)


class Gluttonous(FakeModel):
    """Runs out of memory with a tensor in its hands."""

    def forward(self, token_ids: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        half_done = token_ids.clone()
        self.held = weakref.ref(half_done)
        raise torch.OutOfMemoryError(f"CUDA out of memory after {len(half_done)}")


def test_memory_is_given_back_when_nothing_of_the_step_holds_it_any_more() -> None:
    late, was_held = Pipeline(model=(model := Gluttonous())), []
    late.pipeline._give_back_memory = lambda: was_held.append(model.held() is not None)
    late.take(prefill(1, [[3]]))
    assert late.answered == [(1, FAILED)] and was_held == [False]


def test_outputs_that_fail_take_the_steps_behind_them_along() -> None:
    late = Pipeline()
    late.take(prefill(1, [[3], [4]]), decode(2, [0, 1]))
    before = [column.copy() for column in (late.states.num_tokens, late.states.num_computed_tokens)]
    late.take(decode(3, [0, 1]), decode(4, [1]), decode(5, [0]))
    late.outputs.copies[2].error = ZeroDivisionError("of the third")
    late.arrivals.arrive()
    assert late.answered == [(1, OK), (2, OK), (3, FAILED), (4, SKIPPED), (5, SKIPPED)]
    assert late.results[2].error.code == worker_pb2.STEP_ERROR_CODE_INTERNAL
    after = (late.states.num_tokens, late.states.num_computed_tokens)
    assert all(np.array_equal(*columns) for columns in zip(before, after, strict=True))
    late.states.check_integrity()
    late.take(decode(6, [0]))
    assert late.answered[-1] == (6, SKIPPED)
    _resumes(late, failed=3, next_id=7)


def test_a_step_that_waits_for_outputs_which_fail_is_skipped_and_leaves_nothing() -> None:
    late = Pipeline()
    late.take(prefill(1, [[3]]))
    late.outputs.copies[0].error = ZeroDivisionError()
    late.take(forking(2))
    assert late.answered == [(1, FAILED), (2, SKIPPED)] and late.model.num_forwards == 1
    assert late.states.num_computed_tokens[0] == 0 and late.states.num_tokens[0] == 1


def _resumes(late: Pipeline, failed: int, next_id: int) -> None:
    step = prefill(next_id, [[3, next_token(3, 0)]])
    step.resume_after, step.released_slots_u16 = failed, slots_u16([0, 1])
    late.take(step, decode(next_id + 1, [0]))
    late.pipeline.settle()
    assert late.answered[-2:] == [(next_id, OK), (next_id + 1, OK)]
    assert [tokens_of(result)[0] for result in late.results[-2:]] == successors(3, 0, 3)[1:]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_a_lost_device_ends_the_process_and_nothing_is_answered(error: Exception) -> None:
    late = Pipeline()
    late.take(prefill(1, [[3]]), decode(2, [0]))
    late.outputs.copies[0].error = error
    late.arrivals.arrive()
    assert late.calls == ["end"] and late.results == []


def test_memory_that_runs_out_in_words_is_no_lost_device() -> None:
    for words in ("Triton Error [CUDA]: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"):
        late = Pipeline()
        late.model.error = RuntimeError(words)
        late.take(prefill(1, [[3]]))
        assert late.results[0].error.code == worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY
        assert late.calls == ["give back"]


def test_a_row_that_is_not_finite_is_told_late_and_its_slot_keeps_step() -> None:
    late = Pipeline()
    late.model.poison = 5
    late.take(prefill(1, [[3], [5]]), decode(2, [0, 1]), decode(3, [0, 1]))
    late.arrivals.arrive()
    assert late.answered == [(1, OK), (2, OK), (3, OK)]
    assert [error.row for error in late.results[0].outputs.row_errors] == [1]
    assert [tokens_of(result)[0] for result in late.results] == successors(3, 0, 3)


# ---- Late or not, the same answers ----------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"presence_penalty": 3.0, "logprobs": 2}]


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[worker_pb2.Step, int]]:
    """Steps that come, go and are penalised as they like, and how many outputs arrive after each."""
    script: list[tuple[worker_pb2.Step, int]] = []
    lengths: dict[int, int] = {}  # of the prompts, by slot
    number = 0
    for step_id in range(1, draw(st.integers(2, 12)) + 1):
        gone = draw(st.lists(st.sampled_from(sorted(lengths)), unique=True)) if lengths else []
        step = worker_pb2.Step(step_id=step_id, released_slots_u16=slots_u16(gone))
        for slot in gone:
            del lengths[slot]
        running = draw(st.lists(st.sampled_from(sorted(lengths)), unique=True)) if lengths else []
        free = sorted(set(range(MAX_SEQS)) - set(lengths))
        new = draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
        for slot in new:
            number += 1
            prompt = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
            options: dict[str, Any] = draw(
                st.sampled_from(
                    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "presence_penalty": 3.0}]
                )
            )
            params = inference_pb2.SamplingParams(seed=number, **options)
            group = step.groups.add(request_id=str(number), sampling_params=params)
            group.sequences.add(
                slot=slot, token_ids=prompt, block_table=range(slot * MAX_BLOCKS, (slot + 1) * MAX_BLOCKS)
            )
            lengths[slot] = len(prompt)
        step.rows.slots_u16 = slots_u16([*running, *new])
        step.rows.num_decode_rows = len(running)
        if new:
            step.rows.query_lens_u32 = np.array([lengths[slot] for slot in new], "<u4").tobytes()
            step.rows.num_samples_u16 = slots_u16([1] * len(new))
        script.append((step, draw(st.integers(0, 3))))
    return script


@settings(max_examples=60)
@given(scripts(), st.booleans())
def test_answers_are_those_of_steps_taken_one_by_one(
    script: list[tuple[worker_pb2.Step, int]], has_graphs: bool
) -> None:
    plain, late = Pipeline(HostOutputs()), Pipeline(has_graphs=has_graphs)
    for step, num_arrivals in script:
        plain.take(step)
        late.take(step)
        late.arrivals.arrive(num_arrivals)
    late.pipeline.settle()
    for one, other in zip(plain.results, late.results, strict=True):
        assert (one.step_id, one.status, one.outputs) == (other.step_id, other.status, other.outputs)
    assert np.array_equal(plain.states.num_tokens, late.states.num_tokens)
    for slot in np.flatnonzero(plain.states.occupied):
        known = slice(0, plain.states.num_tokens[slot])
        assert np.array_equal(plain.states.token_ids[slot, known], late.states.token_ids[slot, known])
    late.states.check_integrity()


# ---- Stages ---------------------------------------------------------------------------------------------------------


class QueuedChannel:
    """See `StepChannel`: within one process."""

    def __init__(self) -> None:
        self.messages = queue.SimpleQueue[bytes]()

    def send(self, message: bytes) -> None:
        self.messages.put(message)

    def receive(self) -> bytes:
        return self.messages.get(timeout=60)


class TwoStages:
    """Two pipelines that take the same steps; what the last one draws, the first one answers."""

    def __init__(self) -> None:
        self.channel = QueuedChannel()
        self.last = Pipeline(HostOutputs(), answers=StageAnswers(self.channel, is_last=True))
        self.first = Pipeline(HostOutputs(), answers=StageAnswers(self.channel, is_last=False))

    def take(self, step: worker_pb2.Step, num_arrivals: int = 0) -> None:
        self.last.take(step)
        self.first.take(step)
        self.first.arrivals.arrive(num_arrivals)

    def check_alike(self, plain: Pipeline) -> None:
        """Once all is answered: all three have said and have kept the same, and no answer is left over."""
        self.first.pipeline.settle()
        assert self.channel.messages.empty()
        for stage in (self.last, self.first):
            for one, other in zip(plain.results, stage.results, strict=True):
                assert (one.step_id, one.status, one.error, one.outputs) == (
                    other.step_id,
                    other.status,
                    other.error,
                    other.outputs,
                )
            for slot in np.flatnonzero(plain.states.occupied):
                known = slice(0, plain.states.num_tokens[slot])
                assert np.array_equal(plain.states.token_ids[slot, known], stage.states.token_ids[slot, known])
            assert np.array_equal(plain.states.num_tokens, stage.states.num_tokens)
            assert np.array_equal(plain.states.num_computed_tokens, stage.states.num_computed_tokens)
            stage.states.check_integrity()


def wrong_steps(step_id: int) -> dict[str, worker_pb2.Step]:
    """After steps with slots 0 and 1: one for each place where a contradiction is found."""
    steps = {
        "order": decode(step_id + 1, [0]),
        "release": worker_pb2.Step(step_id=step_id, released_slots_u16=slots_u16([5])),
        "slot": decode(step_id, [4]),
        "token": prefill(step_id, [[3], [99]]),
        "blocks": decode(step_id, [0]),
        "forgotten": decode(step_id, [0, 1]),
        "budget": prefill(step_id, [[1] * 40, [1] * 40]),
    }
    for name in ("token", "budget"):
        steps[name].released_slots_u16 = slots_u16([0, 1])
    steps["blocks"].cached_blocks.block_ids_u32 = np.array([0, 1], "<u4").tobytes()
    steps["blocks"].cached_blocks.hashes = bytes(33)
    steps["forgotten"].forgotten_blocks_u32 = np.array([10_000], "<u4").tobytes()
    return steps


@pytest.mark.parametrize("name", wrong_steps(1))
def test_stages_find_a_wrong_step_together_and_no_answer_is_taken_for_that_of_another(name: str) -> None:
    plain, stages = Pipeline(HostOutputs()), TwoStages()
    resumed = prefill(6, [[7, 8], [9]])
    resumed.resume_after, resumed.released_slots_u16 = 4, slots_u16(range(MAX_SEQS))
    steps = [prefill(1, [[3], [4]]), decode(2, [0]), decode(3, [1]), wrong_steps(4)[name], decode(5, [0, 1])]
    if name == "order":
        resumed.resume_after = 5
    for step in (*steps, resumed, worker_pb2.Step(step_id=7), decode(8, [0, 1])):
        plain.take(step)
        stages.take(step)
    stages.check_alike(plain)
    assert [status for _, status in plain.answered] == [OK, OK, OK, FAILED, SKIPPED, OK, OK, OK]


@settings(max_examples=40)
@given(scripts())
def test_stages_answer_what_one_rank_does(script: list[tuple[worker_pb2.Step, int]]) -> None:
    """Also steps that need a token which is on its way from the last stage."""
    plain, stages = Pipeline(HostOutputs()), TwoStages()
    for step, num_arrivals in script:
        plain.take(step)
        stages.take(step, num_arrivals)
    stages.check_alike(plain)


def test_stages_fork_draw_children_and_tell_of_rows_that_are_not_finite() -> None:
    plain, stages = Pipeline(HostOutputs()), TwoStages()
    stages.last.model.poison = plain.model.poison = 5
    steps = [prefill(1, [[3]]), forking(2), decode(3, [0, 1]), bringing_children(4), decode(5, [0, 2, 3])]
    other = prefill(6, [[5], [6]])
    other.released_slots_u16 = slots_u16([0, 1])
    for step in (*steps, other, decode(7, [0, 1])):
        plain.take(step)
        stages.take(step)
    stages.check_alike(plain)
    assert plain.results[5].outputs.row_errors
