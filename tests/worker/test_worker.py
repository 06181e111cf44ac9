"""The worker's own threads: one launches steps, another waits for outputs that come late."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kernels import select
from octavo.shared.cores import allowed_cores
from protos import worker_pb2
from tests.waiting import wait_until
from tests.worker.fake_model import (
    VOCAB_SIZE,
    FakeModel,
    decode,
    fake_config,
    greedy,
    next_token,
    prefill,
    slots_u16,
    tokens_of,
    u32,
)
from tests.worker.replayed_graphs import ReplayedGraphs
from worker_svc.cache.cache_sizing import CacheSizes, size_cache
from worker_svc.config import WorkerConfig
from worker_svc.errors import StartupError
from worker_svc.host.graph_backend import GraphBackend
from worker_svc.host.memory import GIB
from worker_svc.steps.decode_graphs import batch_sizes
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.mixed_graphs import token_counts
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.profile import Profile, Profiler
from worker_svc.steps.worker import Worker

CONFIG = WorkerConfig(device="cpu", block_size=4, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory=0.001)
DEADLINE_S = 60.0  # of what takes milliseconds on an idle machine


class HeldOutputs:
    """Outputs that arrive when the test lets them, or fail."""

    is_late = True

    def __init__(self) -> None:
        self.may_arrive = threading.Event()
        self.may_arrive.set()  # while the worker measures itself
        self.error: Exception | None = None

    def start(self, tensors: Sequence[torch.Tensor]) -> HeldOutput:
        return HeldOutput(self, tensors)


class HeldOutput:
    def __init__(self, outputs: HeldOutputs, tensors: Sequence[torch.Tensor]) -> None:
        self._outputs, self._tensors = outputs, tensors

    def wait(self) -> None:
        assert self._outputs.may_arrive.wait(DEADLINE_S)
        if self._outputs.error is not None:
            raise self._outputs.error

    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(tensor.numpy() for tensor in self._tensors)


class Run:
    """A worker with a lease and held outputs."""

    def __init__(self) -> None:
        self.model, self.outputs, self.ends = FakeModel(), HeldOutputs(), threading.Event()
        runner = ModelRunner(self.model, fake_config(), CONFIG.block_size, outputs=self.outputs)
        self.worker = Worker(runner, CONFIG, end_process=self.ends.set)
        self.worker.initialize(self.worker.bounds).result(DEADLINE_S)
        self.worker.begin(1).result(DEADLINE_S)
        self.outputs.may_arrive.clear()
        self.num_forwards, self.results = self.model.num_forwards, list[worker_pb2.StepResult]()

    def submit(self, *steps: worker_pb2.Step) -> None:
        for step in steps:
            self.worker.submit(1, step, time.perf_counter_ns(), self.results.append)

    def launched(self, count: int) -> None:
        wait_until(lambda: self.model.num_forwards == self.num_forwards + count, seconds=DEADLINE_S)


def test_the_next_step_is_launched_while_outputs_are_waited_for() -> None:
    run = Run()
    run.submit(prefill(1, [[3]]), decode(2, [0]))
    run.launched(2)
    run.submit(decode(3, [0]))
    run.launched(3)
    assert run.results == [] and run.worker.running[0] == 1
    run.outputs.may_arrive.set()
    wait_until(lambda: len(run.results) == 3, seconds=DEADLINE_S)
    assert [result.step_id for result in run.results] == [1, 2, 3]
    first = next_token(3, 0)
    assert [tokens_of(result) for result in run.results[:2]] == [[first], [next_token(first, 1)]]
    timings = run.results[2].timings
    assert timings.total_ns > timings.prepare_ns + timings.forward_ns + timings.sample_ns > 0


def test_a_token_that_the_model_has_no_row_for_is_refused_with_the_whole_prompt() -> None:
    """Also behind the first chunk, which brings its logprob: there it is looked up in a row, and never embedded."""
    run = Run()
    run.outputs.may_arrive.set()
    step = prefill(1, [[3, VOCAB_SIZE]], params=greedy(prompt_logprobs=0))
    step.groups[0].num_prompt_tokens = 2
    step.rows.query_lens_u32, step.rows.num_samples_u16 = u32([1]), slots_u16([0])
    resumed = prefill(2, [[3, VOCAB_SIZE - 1]])
    resumed.resume_after, resumed.released_slots_u16 = 1, slots_u16([0])
    run.submit(step, resumed)
    wait_until(lambda: len(run.results) == 2, seconds=DEADLINE_S)
    refused, taken = run.results
    assert refused.error.code == worker_pb2.STEP_ERROR_CODE_PROTOCOL and f"holds {VOCAB_SIZE}," in refused.error.message
    assert tokens_of(taken) == [next_token(VOCAB_SIZE - 1, 1)]


def test_a_lease_ends_when_the_outputs_of_its_steps_are_here() -> None:
    run = Run()
    run.submit(prefill(1, [[3]]))
    run.launched(1)
    ended = run.worker.end()
    assert not ended.done()
    run.outputs.may_arrive.set()
    ended.result(DEADLINE_S)
    assert run.worker.running == (0, 0)
    run.submit(decode(2, [0]))
    run.worker.begin(2).result(DEADLINE_S)
    assert run.model.num_forwards == run.num_forwards + 1


def test_what_a_lease_withdrew_at_its_end_is_not_told_to_the_next_one() -> None:
    run, has_begun, may_go_on = Run(), threading.Event(), threading.Event()
    run.outputs.may_arrive.set()
    step = prefill(1, [[3, 4, 5, 6, 7]])
    step.cached_blocks.block_ids_u32, step.cached_blocks.hashes = u32([0]), bytes(32)
    run.submit(step)
    wait_until(lambda: len(run.results) == 1, seconds=DEADLINE_S)

    def wait() -> None:
        has_begun.set()
        may_go_on.wait()

    run.worker.thread.submit(wait)
    assert has_begun.wait(DEADLINE_S)
    run.submit(worker_pb2.Step(step_id=2, forgets_all_blocks=True))
    ended = run.worker.end()
    may_go_on.set()
    ended.result(DEADLINE_S)
    assert run.worker.begin(2).result(DEADLINE_S).cached_blocks.block_ids_u32 == b""
    assert len(run.results) == 1


def test_a_lease_of_sizes_that_are_being_replaced_is_refused() -> None:
    run, has_begun, may_go_on = Run(), threading.Event(), threading.Event()
    run.worker.end().result(DEADLINE_S)

    def release() -> None:
        has_begun.set()
        may_go_on.wait()

    run.worker._runner.release_cache = release  # type: ignore[method-assign]  # the step that is held
    replaced = run.worker.initialize(replace(run.worker.bounds, max_num_seqs=1))
    assert has_begun.wait(DEADLINE_S)
    begun = run.worker.begin(2)
    may_go_on.set()
    assert replaced.result(DEADLINE_S).max_num_seqs == 1
    with pytest.raises(StartupError, match="Initialize again"):
        begun.result(DEADLINE_S)


def test_a_step_is_answered_where_memory_cannot_be_given_back() -> None:
    run = Run()
    run.outputs.may_arrive.set()

    def give_back() -> None:
        raise RuntimeError("CUDA error: out of memory")

    assert run.worker._pipeline is not None
    run.worker._pipeline._give_back_memory = give_back
    run.model.error = MemoryError()
    run.submit(prefill(1, [[3]]))
    wait_until(lambda: len(run.results) == 1, seconds=DEADLINE_S)
    assert run.results[0].status == worker_pb2.STEP_STATUS_FAILED and not run.ends.is_set()
    run.worker.end().result(DEADLINE_S)


def test_the_process_ends_where_steps_cannot_be_answered() -> None:
    run = Run()

    def settle() -> None:
        raise AssertionError("a mistake of ours")

    assert run.worker._pipeline is not None
    run.worker._pipeline.settle = settle  # type: ignore[method-assign]  # the mistake
    with pytest.raises(AssertionError):
        run.worker.end().result(DEADLINE_S)
    assert run.ends.is_set()


def test_drained_means_answered() -> None:
    run = Run()
    run.submit(prefill(1, [[3]]), decode(2, [0]))
    answered = run.worker.answered()
    run.launched(2)
    run.outputs.may_arrive.set()
    answered.result(DEADLINE_S)
    assert len(run.results) == 2


def test_a_lost_device_ends_the_process() -> None:
    run = Run()
    run.submit(prefill(1, [[3]]))
    run.outputs.error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    run.outputs.may_arrive.set()
    assert run.ends.wait(DEADLINE_S) and run.results == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_what_a_worker_does_before_it_is_ready(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.shared.terminal_row.is_terminal", lambda: is_terminal)
    with capture_logs():
        worker = Worker(ModelRunner(FakeModel(), fake_config(), CONFIG.block_size), CONFIG)
        worker.initialize(worker.bounds).result(DEADLINE_S)
    rows = ["warming up: the first steps", "warming up: copies of cache blocks", ""] if is_terminal else []
    assert capsys.readouterr().err == "".join(f"\r{row}\x1b[K" for row in rows)


def test_attentions_scratch_is_there_before_graphs_and_for_the_limits_that_were_agreed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    runner = ModelRunner(FakeModel(), fake_config(), CONFIG.block_size)
    worker = Worker(runner, CONFIG)
    worker.initialize(worker.bounds).result()
    assert runner._scratch is not None and runner.graph_sizes == worker.graph_sizes == ([], [])
    heads = (fake_config().num_heads, fake_config().head_size)
    assert runner._scratch.sums.shape == (8192, *heads)
    num_bytes = sum(getattr(runner._scratch, name).nbytes for name in runner._scratch.__slots__)
    assert num_bytes == runner.scratch_bytes(worker.bounds.max_num_seqs, worker.bounds.max_model_len)
    runner.release_cache()
    assert runner._scratch is None


def test_logits_of_graphs_are_planned_beside_the_memory_that_graphs_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the backend begins to count, and the cache leaves room for them."""
    order, planned, new, measure = list[str](), list[int](), GraphBuffers.new, Profiler.measure

    def measured(*args: Any, **options: Any) -> Profile:
        return replace(measure(*args, **options), peak_bytes=1 << 20)  # what a process holds differs from run to run

    def buffers_of(*args: Any, **options: Any) -> GraphBuffers:
        order.append("buffers")
        return new(*args, **options)

    def planned_cache(*args: Any) -> CacheSizes:
        planned.append(args[4])
        return size_cache(*args)

    def backend(device: torch.device) -> GraphBackend:
        order.append("backend")
        return ReplayedGraphs(device)

    monkeypatch.setattr(Profiler, "measure", measured)
    monkeypatch.setattr(GraphBuffers, "new", buffers_of)
    monkeypatch.setattr("worker_svc.steps.worker.size_cache", planned_cache)

    for graphs in (None, backend):
        worker = Worker(ModelRunner(FakeModel(), fake_config(), CONFIG.block_size, graph_backend=graphs), CONFIG)
        limits = worker.bounds
        worker.initialize(limits).result(DEADLINE_S)
    assert order == ["buffers", "backend"]
    assert worker.graph_sizes == (batch_sizes(limits.max_num_seqs), token_counts(limits.max_num_batched_tokens))
    buffers = worker._runner._buffers
    assert buffers is not None
    num_bytes = buffers.block_tables.nbytes + buffers.logits.nbytes
    assert planned[1] - planned[0] == num_bytes + int(CONFIG.cuda_graph_memory * GIB)


@pytest.mark.usefixtures("core_times_are_counted")
def test_steps_beside_busy_neighbours_take_fewer_threads() -> None:
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed_cores()]
    try:
        model = FakeModel(fake_config())
        worker = Worker(ModelRunner(model, model.config, CONFIG.block_size), CONFIG)
        worker.thread.call(lambda: torch.set_num_threads(2)).result(DEADLINE_S)
        worker.initialize(worker.bounds).result(DEADLINE_S)
        worker.begin(1).result(DEADLINE_S)
        results: list[worker_pb2.StepResult] = []

        def a_step_takes_one_thread() -> bool:
            worker.submit(1, worker_pb2.Step(step_id=len(results) + 1), time.perf_counter_ns(), results.append)
            return worker.thread.call(torch.get_num_threads).result(DEADLINE_S) == 1

        wait_until(a_step_takes_one_thread, seconds=DEADLINE_S)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert {result.status for result in results} == {worker_pb2.STEP_STATUS_OK}
