"""A lease outlives an interpreter that is busy for seconds, on either side; a stopped process is found all the same."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.leases.worker_handle import SILENCE_LIMIT_NS
from scheduler_svc.output.output_processor import Delivery
from scheduler_svc.serving import Serving
from tests.forkserver import ForkedCommand
from tests.waiting import wait_until
from tests.worker.fake_model import next_token
from tests.worker.fake_model_process import HOLD_S, hold_interpreter
from worker_svc.service.lease import EXPIRY_S

TIMEOUT_S = 30.0


@pytest.fixture
def worker() -> Iterator[tuple[ForkedCommand, str]]:
    """And its address."""
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as said:
        process = ForkedCommand([], stdout=writer, module="tests.worker.fake_model_process")
        os.close(writer)
        yield process, f"127.0.0.1:{int(said.readline())}"
        process.kill()
        process.wait()


def test_interpreters_that_are_held_for_seconds_lose_no_lease_and_a_stopped_worker_is_found_soon(
    worker: tuple[ForkedCommand, str],
) -> None:
    process, address = worker
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    serving = Serving(SchedulerConfig(worker=(address,)), deliveries.put)
    serving.start()
    try:
        wait_until(lambda: serving.is_ready and bool(serving.engine.workers), "a worker joins", seconds=TIMEOUT_S)
        params = pb.SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
        tokens = generate(serving, deliveries, params)
        for _ in range(10):
            next(tokens)
        with capture_logs() as events:
            process.send_signal(signal.SIGUSR1)
            hold_interpreter()
            token_ids = list(tokens)
        assert len(token_ids) == 30, "as if nothing had been"
        assert [event for event in events if event["event"] in ("worker lost", "worker joined")] == []
        (handle,) = serving.engine.workers
        assert handle.epoch == 1

        assert min(EXPIRY_S, SILENCE_LIMIT_NS / 1e9) > 2 * HOLD_S, "or it is a message's absence that tells"
        process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_until(lambda: not serving.engine.workers, "a stopped worker is found", seconds=TIMEOUT_S)
        assert time.monotonic() - stopped_s < 4
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(serving.engine.workers), "a worker that goes on joins again", seconds=TIMEOUT_S)
        assert serving.engine.workers[0].epoch == 2
    finally:
        serving.stop()


def generate(serving: Serving, deliveries: queue.SimpleQueue[Delivery], params: pb.SamplingParams) -> Iterator[int]:
    """The tokens of one request as they come, each the successor of the one before."""
    prompt = [3, 5]
    request = pb.GenerateRequest(request_id="one", prompt_token_ids=pb.TokenIds(ids=prompt), sampling_params=params)
    serving.engine.submit(serving.frontend.prepare(request))
    last, position, is_over = prompt[-1], len(prompt) - 1, False
    while not is_over:
        for _, response in deliveries.get(timeout=TIMEOUT_S):
            for delta in response.outputs:
                for token_id in delta.token_ids:
                    assert token_id == next_token(last, position)
                    last, position = token_id, position + 1
                    yield token_id
            is_over = response.HasField("usage")
