"""Ten times what a server can do, for a minute: refusals at once, memory flat, whoever is admitted as fast as ever.

A simulated worker with steps of a fixed length makes the capacity known. `make test` takes some seconds of it. Times
are told; what only a request that waits for others would take is judged.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.chaos.memory import MIB, Process
from tests.forkserver import ForkedCommand
from tests.integration.scheduler_process import Service, scheduler

STEP_MS, NUM_SEQS, NUM_TOKENS, MAX_WAITING = 20, 4, 20, 8
REQUESTS_PER_S = NUM_SEQS / (NUM_TOKENS * STEP_MS / 1e3)  # what it can do at most
MOST_GROWTH_BYTES = 8 * MIB
AT_ONCE_S = NUM_TOKENS * STEP_MS * MAX_WAITING / NUM_SEQS / 1e3  # sooner than whoever waits has a turn
STALL_S = 10.0  # a refusal and a step take milliseconds, and a busy machine some hundreds of them
PROMPT = "some words to tokenise " * 8


@pytest.fixture(params=["--frontends=1", pytest.param("--frontends=2", marks=pytest.mark.chaos)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    port = free_port()
    options = f"--port={port}", f"--step-ms={STEP_MS}", f"--max-num-seqs={NUM_SEQS}", "--max-model-len=512"
    worker = ForkedCommand(options, module="octavo.bench.simulated_worker")
    try:
        flags = (f"--worker=127.0.0.1:{port}", f"--max-waiting-requests={MAX_WAITING}", request.param)
        with scheduler(*flags, "--log-level=warning") as service:
            service.wait_until_ready()
            yield service
    finally:
        worker.kill()
        worker.wait()


class Crowd:
    """Clients that send requests and note how they fare. Times in seconds."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        self.refused_after: list[float] = []
        self.gaps: list[float] = []  # between two messages of an admitted request
        self.num_served = 0
        self._stub = stub

    async def one(self) -> None:
        sent_s = time.monotonic()
        params = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        call = self._stub.Generate(pb.GenerateRequest(prompt=PROMPT, sampling_params=params), timeout=60)
        arrivals: list[float] = []
        num_tokens = 0
        try:
            async for response in call:
                arrivals.append(time.monotonic())
                num_tokens += sum(len(delta.token_ids) for delta in response.outputs)
        except grpc.aio.AioRpcError as error:
            self.refused_after.append(time.monotonic() - sent_s)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
            status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
            assert status.details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
            assert not arrivals, "refused after it was admitted"
            return
        assert num_tokens == NUM_TOKENS
        self.num_served += 1
        self.gaps += [later - earlier for earlier, later in itertools.pairwise(arrivals[1:])]

    async def at_rate(self, requests_per_s: float, seconds: float) -> None:
        """Sends on schedule, whatever becomes of what was sent before."""
        started_s = time.monotonic()
        tasks = []
        for number in range(int(requests_per_s * seconds)):
            await asyncio.sleep(started_s + number / requests_per_s - time.monotonic())
            tasks.append(asyncio.create_task(self.one()))
        await asyncio.gather(*tasks)

    async def in_turn(self, count: int) -> None:
        for _ in range(count):
            await self.one()


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.chaos)])
async def test_ten_times_what_it_can_do(service: Service, seconds: int) -> None:
    process = Process(service.process.pid)
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub, control = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel)
        calm = Crowd(stub)
        await asyncio.gather(*(calm.in_turn(2) for _ in range(NUM_SEQS)))
        storm = Crowd(stub)
        warm_up = asyncio.create_task(storm.at_rate(10 * REQUESTS_PER_S, 1))
        await warm_up
        process.sample(0)
        most_waiting = 0
        sending = asyncio.create_task(storm.at_rate(10 * REQUESTS_PER_S, seconds))
        while not sending.done():
            most_waiting = max(most_waiting, (await control.GetLoad(pb.GetLoadRequest())).num_requests_waiting)
            process.sample(storm.num_served + len(storm.refused_after))
            await asyncio.wait([sending], timeout=0.1)
        await sending
    wait_until_nothing_is_left(service.address)
    process.sample(storm.num_served + len(storm.refused_after))
    print(
        f"{storm.num_served} served, {len(storm.refused_after)} refused; "
        f"refusals {_percentiles(storm.refused_after)}; gaps of the admitted {_percentiles(storm.gaps)}, "
        f"without overload {_percentiles(calm.gaps)}; {process.tell()}"
    )
    assert not calm.refused_after
    assert statistics.median(storm.refused_after) < AT_ONCE_S and max(storm.refused_after) < STALL_S, "a refusal waits"
    assert max(storm.gaps) < STALL_S, "who was admitted waits again"
    assert most_waiting <= MAX_WAITING, "more wait than may"
    assert storm.num_served > MAX_WAITING and storm.refused_after
    assert process.growth_bytes < MOST_GROWTH_BYTES


def _percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms"
