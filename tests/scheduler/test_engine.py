"""The step loop with a fake worker over real gRPC: steps in flight, losses, failures, bounds, aborts."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine_core import EngineCore
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull
from scheduler_svc.output.output_processor import Delivery
from scheduler_svc.serving import Serving
from tests.fakes import FakeWorker, say_forever, spell
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.hashed_tokens import hashed_after
from tests.scheduler.simulated_answers import NOTHING_TO_DRAW
from tests.waiting import wait_until

TIMEOUT_S = 60.0


class Client:
    """Submits requests to a `Serving` and gathers what comes back, by request id."""

    def __init__(self, **options: Any) -> None:
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.serving = Serving(SchedulerConfig(**options), self._deliveries.put)
        self.text: dict[str, str] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.last: dict[str, pb.GenerateResponse] = {}
        self.reasons: dict[str, int] = {}

    def submit(self, request_id: str, prompt: str = "say|", adapter: str = "", **params: Any) -> None:
        sampling_params = pb.SamplingParams(**{"temperature": 0, **params})
        request = pb.GenerateRequest(
            request_id=request_id, prompt=prompt, adapter=adapter, sampling_params=sampling_params
        )
        group = self.serving.frontend.prepare(request)
        self.text[request_id], self.token_ids[request_id] = "", []
        self.serving.engine.submit(group)

    def read(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert time.monotonic() < deadline, f"nothing more came; so far {self.text}"
            try:
                delivery = self._deliveries.get(timeout=0.05)
            except queue.Empty:
                continue
            for stream, response in delivery:
                self._take(stream.group.request_id, response)

    def _take(self, request_id: str, response: pb.GenerateResponse) -> None:
        assert request_id not in self.last, "a message after the last"
        for delta in response.outputs:
            self.text[request_id] += delta.text
            self.token_ids[request_id] += delta.token_ids
            if delta.finish_reason:
                assert request_id not in self.reasons, "two finish reasons"
                self.reasons[request_id] = delta.finish_reason
        if response.HasField("usage"):
            self.last[request_id] = response

    def forget(self, request_id: str) -> None:
        """Of a request that has ended, so that its id can be used again."""
        del self.last[request_id], self.reasons[request_id]

    def finish(self, *request_ids: str) -> None:
        self.read(lambda: all(request_id in self.last for request_id in request_ids))

    def wait(self, until: Callable[[], bool]) -> None:
        wait_until(until, seconds=TIMEOUT_S)


@contextmanager
def client(worker: FakeWorker, **options: Any) -> Iterator[Client]:
    it = Client(worker=(worker.address,), **options)
    it.serving.start()
    try:
        it.wait(lambda: it.serving.is_ready)
        yield it
    finally:
        it.serving.stop()


def steps_overlap(worker: FakeWorker) -> bool:
    """Whether some step was received before the one ahead of it was answered."""
    answered = dict(worker.answered)
    return any(at < answered[step - 1] for step, at in worker.received if step - 1 in answered)


@pytest.mark.parametrize(("depth", "overlaps"), [(1, False), (2, True)])
def test_depth_decides_whether_a_step_is_sent_before_the_last_is_answered(depth, overlaps):
    with FakeWorker(delay_s=0.05) as worker, client(worker, steps_in_flight=depth) as it:
        it.submit("one", max_tokens=8)
        it.finish("one")
        assert it.token_ids["one"] == hashed_after("say|", 8)
        assert steps_overlap(worker) is overlaps


def test_many_requests_at_once_get_their_own_tokens():
    with FakeWorker(num_blocks=40) as worker, client(worker) as it:
        prompts = {f"request {number}": "x" * (1 + number) + "|" for number in range(24)}
        for request_id, prompt in prompts.items():
            it.submit(request_id, prompt, max_tokens=20)
        it.finish(*prompts)
        for request_id, prompt in prompts.items():
            assert it.token_ids[request_id] == hashed_after(prompt, 20)
        assert it.last["request 3"].usage.prompt_tokens == 5
        worker_state = it.serving.engine.workers[0]
        assert worker_state.scheduler.blocks.num_free_blocks == 40
        worker_state.scheduler.check_integrity()


def test_text_is_never_half_a_character_and_ends_with_the_end_token():
    with FakeWorker(spell("naïve 漢字 👍🏽 fin")) as worker, client(worker) as it:
        it.submit("one")
        it.finish("one")
        assert it.text["one"] == "naïve 漢字 👍🏽 fin"
        assert it.reasons["one"] == pb.FINISH_REASON_STOP
        assert not it.serving.engine.abort("one"), "it lives no more"


def test_a_stop_string_across_tokens_cuts_the_text_and_frees_the_sequence():
    with FakeWorker(say_forever("one two three four "), delay_s=0.005) as worker, client(worker) as it:
        it.submit("one", stop=["o three"])
        it.finish("one")
        assert it.text["one"] == "one tw"
        assert it.reasons["one"] == pb.FINISH_REASON_STOP
        it.wait(lambda: not it.serving.engine.workers[0].scheduler.groups.running)
        assert it.serving.engine.workers[0].scheduler.blocks.num_free_blocks == 64
        assert len(worker.answered) < 100, "it was meant to be freed long before its length"


def test_an_id_can_be_used_again_as_soon_as_a_stop_string_has_ended_it():
    with FakeWorker(say_forever("one two three four ")) as worker, client(worker) as it:
        for _ in range(20):
            it.submit("one", stop=["two"])
            it.finish("one")
            assert it.text["one"] == "one "
            it.forget("one")


def test_a_stop_token_id_ends_with_stop_and_is_named():
    with FakeWorker(say_forever("one two three four ")) as worker, client(worker) as it:
        it.submit("one", stop_token_ids=[ord("w"), 300])
        it.finish("one")
        assert it.token_ids["one"] == list(b"one tw") and it.text["one"] == "one t"
        assert it.reasons["one"] == pb.FINISH_REASON_STOP
        assert it.last["one"].outputs[0].matched_stop.token_id == ord("w")
        assert it.last["one"].timings.queue_ns > 0


@pytest.mark.parametrize(("why", "is_invalid"), [("not finite", False), (NOTHING_TO_DRAW, True)])
def test_a_row_that_cannot_be_drawn_ends_its_request_alone(why, is_invalid):
    def row_error(history: np.ndarray) -> str | None:
        return why if history[0] == ord("b") and len(history) == 8 else None

    with FakeWorker(row_error=row_error, delay_s=0.002) as worker, client(worker) as it:
        for request_id, prompt in {"good": "say|", "bad": "bad|", "other": "o|"}.items():
            it.submit(request_id, prompt, max_tokens=20)
        it.finish("good", "bad", "other")
        assert it.token_ids["bad"] == hashed_after("bad|", 4)
        assert it.reasons["bad"] == pb.FINISH_REASON_ERROR
        code = "INVALID_ARGUMENT" if is_invalid else "INTERNAL"
        expected = pb.OutputError(code=code, message=why, retryable=not is_invalid)
        assert it.last["bad"].outputs[0].error == expected, "what its own parameters forbid fails again"
        assert it.token_ids["good"] == hashed_after("say|", 20)
        assert it.token_ids["other"] == hashed_after("o|", 20)
        assert not any(it.serving.engine.abort(request_id) for request_id in it.last), "none of them lives"
        assert it.serving.engine.workers[0].scheduler.blocks.num_free_blocks == 64
        assert worker.num_leases == 1


def test_a_step_of_fewer_tokens_than_the_worker_has_sequences_is_no_obstacle():
    with FakeWorker() as worker, client(worker, max_num_batched_tokens=3) as it:
        it.submit("one", "a longer prompt|", max_tokens=5)
        it.finish("one")
        assert it.token_ids["one"] == hashed_after("a longer prompt|", 5)


def test_a_worker_that_is_restarted_is_picked_up_and_requests_go_on():
    worker = FakeWorker(delay_s=0.02)
    with client(worker.__enter__()) as it:
        for number in range(4):
            it.submit(f"request {number}", "p" * number + "|", max_tokens=40)
        it.read(lambda: all(len(ids) > 5 for ids in it.token_ids.values()))
        worker.kill()
        it.wait(lambda: not it.serving.engine.workers)
        it.submit("in between", "q|", max_tokens=10)
        with FakeWorker(port=worker.port) as second:
            it.finish(*(f"request {number}" for number in range(4)), "in between")
            for number in range(4):
                assert it.token_ids[f"request {number}"] == hashed_after("p" * number + "|", 40)
                assert it.last[f"request {number}"].timings.times_moved == 1
            assert it.token_ids["in between"] == hashed_after("q|", 10)
            assert second.num_leases == 1


def test_a_failed_step_is_rolled_back_and_each_group_runs_alone_once():
    with FakeWorker(delay_s=0.005) as worker, client(worker) as it:
        for number in range(3):
            it.submit(f"request {number}", "p" * number + "|", max_tokens=30)
        it.read(lambda: all(len(ids) > 3 for ids in it.token_ids.values()))
        worker.fail_next()
        it.finish(*(f"request {number}" for number in range(3)))
        for number in range(3):
            assert it.token_ids[f"request {number}"] == hashed_after("p" * number + "|", 30)
        assert it.serving.engine.workers[0].statistics.num_failed == 1


def test_a_group_that_fails_alone_ends_with_an_error_and_the_next_one_runs():
    with FakeWorker() as worker, client(worker) as it:
        worker.fail_next()
        it.submit("bad", max_tokens=5)
        it.finish("bad")
        assert it.reasons["bad"] == pb.FINISH_REASON_ERROR
        it.submit("good", max_tokens=5)
        it.finish("good")
        assert it.token_ids["good"] == hashed_after("say|", 5)


def test_an_aborted_request_ends_with_what_it_has_and_frees_everything():
    with FakeWorker(delay_s=0.02) as worker, client(worker) as it:
        it.submit("one", max_tokens=200)
        it.read(lambda: len(it.token_ids["one"]) > 3)
        assert it.serving.engine.abort("one")
        it.finish("one")
        assert it.reasons["one"] == pb.FINISH_REASON_ABORT
        assert not it.serving.engine.abort("one")
        assert it.serving.engine.workers[0].scheduler.blocks.num_free_blocks == 64


def test_the_queue_is_bounded_and_ids_are_unique_while_they_live():
    with FakeWorker(delay_s=0.05, max_num_seqs=1) as worker, client(worker, max_waiting_requests=2) as it:
        it.submit("running", max_tokens=100)
        it.wait(lambda: it.serving.engine.workers[0].num_running == 1)
        it.submit("first", max_tokens=1)
        with pytest.raises(DuplicateRequest):
            it.submit("first", max_tokens=1)
        it.submit("second", max_tokens=1)
        with pytest.raises(QueueFull):
            it.submit("third", max_tokens=1)


def test_two_that_replace_a_request_at_once_are_both_taken():
    """The later one replaces the earlier one: a client's next attempt finds its last one on the way in."""
    with FakeWorker(delay_s=0.02) as worker, client(worker) as it:
        it.submit("one", max_tokens=200)
        core, first = EngineCore(it.serving.engine), it.serving.engine.find("one")
        request = pb.GenerateRequest(request_id="one", prompt="say|", attempt=1)
        groups = [it.serving.frontend.prepare(request) for _ in range(2)]

        async def replace() -> None:
            await asyncio.gather(*(core.submit(group, replaces=True) for group in groups))

        asyncio.run(replace())
        assert it.serving.engine.find("one") == groups[1:]
        assert all(group.is_finished for group in (*first, groups[0]))


def test_a_request_that_was_never_taken_has_not_ended():
    """Its client left while it waited for the end of the one that it replaces."""
    loop = Loop()
    loop.join()
    loop.turn()
    core, first, second = EngineCore(loop.engine), loop.group("one"), loop.group("one")
    loop.engine.submit(first)

    async def leave() -> None:
        submitting = asyncio.create_task(core.submit(second, replaces=True))
        await asyncio.sleep(0.01)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        core.abandon(second)

    asyncio.run(leave())
    loop.turn()
    assert first.is_finished and not second.is_finished
    assert sum(loop.engine.metrics.of("").num_finished.values()) == 1


def test_before_the_first_worker_requests_are_refused():
    it = Client(worker=("127.0.0.1:1",))
    it.serving.start()
    try:
        with pytest.raises(NotReady):
            it.submit("one")
    finally:
        it.serving.stop()


def test_a_silent_worker_is_given_up_and_its_requests_wait(monkeypatch: pytest.MonkeyPatch):
    """Also where its process answers gRPC's pings."""
    monkeypatch.setattr("scheduler_svc.leases.worker_handle.SILENCE_LIMIT_NS", 2_000_000_000)
    with FakeWorker(delay_s=0.01) as worker, client(worker) as it:
        it.submit("one", max_tokens=60)
        it.read(lambda: len(it.token_ids["one"]) > 3)
        worker.delay_s = 2.6  # no message for longer than the limit
        it.wait(lambda: not it.serving.engine.workers)
        worker.delay_s = 0.0
        it.finish("one")
        assert it.token_ids["one"] == hashed_after("say|", 60)
        assert worker.num_leases == 2


def test_with_all_workers_lost_each_request_waits_its_time_and_ends_with_an_error():
    worker = FakeWorker(delay_s=0.01)
    with client(worker.__enter__(), worker_wait_timeout=0.6) as it:
        it.submit("running", max_tokens=200)
        it.read(lambda: len(it.token_ids["running"]) > 3)
        worker.kill()
        it.wait(lambda: not it.serving.engine.workers)
        lost_s = time.monotonic()
        it.finish("running")
        it.submit("late", max_tokens=5)
        late_s = time.monotonic()
        it.finish("late")
        assert time.monotonic() - late_s >= 0.6 and late_s - lost_s >= 0.5
        for request_id in ("running", "late"):
            assert it.reasons[request_id] == pb.FINISH_REASON_ERROR
            error = it.last[request_id].outputs[0].error
            assert "--worker-wait-timeout" in error.message and error.retryable
        with FakeWorker(port=worker.port):
            it.wait(lambda: bool(it.serving.engine.workers))
            it.submit("after", max_tokens=5)
            it.finish("after")
            assert it.token_ids["after"] == hashed_after("say|", 5)


def test_requests_go_on_when_a_worker_of_their_model_comes_back_in_time() -> None:
    old = FakeWorker(delay_s=0.01)
    with client(old.__enter__(), worker_wait_timeout=30) as it, FakeWorker(model_hash="new") as new:
        it.submit("one", max_tokens=60)
        it.read(lambda: len(it.token_ids["one"]) > 3)
        it.serving.pool._add(new.address)
        old.kill()
        with FakeWorker(port=old.port):
            it.finish("one")
        assert it.token_ids["one"] == hashed_after("say|", 60)
