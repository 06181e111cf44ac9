"""A request that costs every worker that runs it, and workers that run out of memory: the others do not pay for it.

Workers are fakes whose step stream breaks where a real one's process would end; the scheduler is the real step loop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.output.output_processor import Delivery
from scheduler_svc.serving import Serving
from tests.fakes import FakeWorker, hashed_token
from tests.waiting import wait_until

NUM_REQUESTS = 24
MAX_TOKENS = 40
LIMIT_S = 60.0
MAX_WORKER_LOSSES = 3


class Crash(Exception):
    """Takes the step stream with it."""


@dataclass
class Poison:
    """A language that only a prompt of `p`s does not survive, at its `place`-th token."""

    place: int
    num_crashes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_token(self, history: np.ndarray, index: int) -> int:
        if history[0] == ord("p") and len(history) == len("poison|") + self.place:
            with self.lock:
                self.num_crashes += 1
            raise Crash("a worker ends")
        return hashed_token(history, index)


class Requests:
    """Sent at once to a scheduler with some workers; what came back by request id."""

    def __init__(self, serving: Serving, deliveries: queue.SimpleQueue[Delivery]) -> None:
        self.serving, self._deliveries = serving, deliveries
        self.token_ids: dict[str, list[int]] = {}
        self.last: dict[str, pb.GenerateResponse] = {}
        self.errors: dict[str, str] = {}

    def submit(self, prompt: str, max_tokens: int = MAX_TOKENS) -> None:
        params = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(request_id=prompt, prompt=prompt, sampling_params=params)
        self.token_ids[prompt] = []
        self.serving.engine.submit(self.serving.frontend.prepare(request))

    def finish(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.last.keys() != self.token_ids.keys():
            assert time.monotonic() < deadline, f"no end of {self.token_ids.keys() - self.last.keys()}"
            try:
                delivery = self._deliveries.get(timeout=0.1)
            except queue.Empty:
                continue
            for stream, response in delivery:
                self._take(stream.group.request_id, response)

    def _take(self, request_id: str, response: pb.GenerateResponse) -> None:
        for delta in response.outputs:
            self.token_ids[request_id] += delta.token_ids
            if delta.finish_reason == pb.FINISH_REASON_ERROR:
                self.errors[request_id] = delta.error.message
        if response.HasField("usage"):
            self.last[request_id] = response

    def times_moved(self, request_id: str) -> int:
        return self.last[request_id].timings.times_moved


@contextmanager
def requests_on(*workers: FakeWorker, **options: Any) -> Iterator[Requests]:
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    serving = Serving(SchedulerConfig(worker=tuple(worker.address for worker in workers), **options), deliveries.put)
    serving.start()
    try:
        wait_until(lambda: len(serving.engine.workers) == len(workers), seconds=LIMIT_S)
        yield Requests(serving, deliveries)
    finally:
        serving.stop()


def hashed_after(prompt: str, count: int = MAX_TOKENS) -> list[int]:
    history = list(prompt.encode())
    for _ in range(count):
        history.append(hashed_token(np.array(history)))
    return history[len(prompt) :]


@pytest.mark.parametrize(("num_workers", "steps_in_flight", "place"), [(1, 2, 0), (1, 1, 1), (2, 2, 1), (2, 2, 20)])
def test_a_request_that_costs_every_worker_ends_alone(num_workers, steps_in_flight, place):
    poison = Poison(place)
    good = [f"good {number}|" for number in range(NUM_REQUESTS)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(FakeWorker(poison.next_token, max_num_seqs=16, num_blocks=400))
            for _ in range(num_workers)
        ]
        requests = stack.enter_context(requests_on(*workers, steps_in_flight=steps_in_flight))
        for prompt in (*good[:8], "poison|", *good[8:]):
            requests.submit(prompt)
        requests.finish()
    assert requests.errors == {"poison|": f"{MAX_WORKER_LOSSES} workers were lost while running it"}
    assert requests.token_ids["poison|"] == hashed_after("poison|")[:place]
    assert poison.num_crashes == MAX_WORKER_LOSSES
    for prompt in good:
        assert requests.token_ids[prompt] == hashed_after(prompt), prompt
    assert any(requests.times_moved(prompt) for prompt in good), "others were meant to be there"


def test_two_such_requests_end_and_nobody_else():
    poison = Poison(place=5)
    good = [f"good {number}|" for number in range(NUM_REQUESTS)]
    with FakeWorker(poison.next_token, max_num_seqs=16, num_blocks=400) as worker, requests_on(worker) as requests:
        for prompt in ("poison|", *good, "p~ison|"):
            requests.submit(prompt)
        requests.finish()
    assert requests.errors.keys() == {"poison|", "p~ison|"}
    assert poison.num_crashes <= 2 * MAX_WORKER_LOSSES
    for prompt in good:
        assert requests.token_ids[prompt] == hashed_after(prompt), prompt


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_shrink_until_they_fit_into_the_memory(steps_in_flight):
    """Prompts of more tokens than any step can hold are computed in parts, and everybody gets his tokens."""
    prompts = [f"{number}" * 40 + "|" for number in range(NUM_REQUESTS)]
    with FakeWorker(out_of_memory_above=20, num_blocks=400, max_num_batched_tokens=128) as worker:
        with requests_on(worker, steps_in_flight=steps_in_flight) as requests:
            for prompt in prompts:
                requests.submit(prompt)
            requests.finish()
            (state,) = requests.serving.engine.workers
            assert state.statistics.num_failed >= 3 and state.scheduler.max_num_batched_tokens <= 20
    assert not requests.errors and worker.num_leases == 1
    for prompt in prompts:
        assert requests.token_ids[prompt] == hashed_after(prompt), prompt
