"""Thousands of requests, many of which their clients abandon in every way there is: memory stays flat, nothing is left.

A real worker with a tiny model and so little cache that requests are preempted. `make chaos` sends ten thousand.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.conftest import WORKER_OPTIONS
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.chaos.memory import MIB, Process
from tests.chaos.worker_process import WorkerProcess
from tests.integration.scheduler_process import Service, scheduler
from tests.tiny_models import make_tiny_llama

AT_ONCE = 32
NUM_WARM_UP = 100
MOST_SAMPLES = 50
NUM_PROMPTS = 200  # no more: the tokenizers library remembers the last ten thousand words, and these are one word each
MOST_BYTES_A_REQUEST = 2048  # of lasting growth; a request that is kept holds several times that
FEW, MANY = 300, 10_000
# By which memory may grow in every part of a run. In the short one pools are still filling, by some 5,000 bytes a
# request: it finds a message or a cache that is kept with each, and leaves a request that is kept to the long one.
MOST_STEADY_BYTES_A_REQUEST = {FEW: 50_000, MANY: MOST_BYTES_A_REQUEST}
MOST_BYTES_OF_NOISE = 48 * MIB  # pools that fill late, code that is used for the first time, fragmentation
FATES = ["read", "read", "read", "cancel", "deadline", "abort", "unread"]
SHARED = "In the beginning there was a long prefix that many prompts share, so that blocks are found in the cache. "


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    model = make_tiny_llama(tmp_path / "tiny")
    process = WorkerProcess([f"--model={model}", "--num-threads=1", *WORKER_OPTIONS], tmp_path / "worker.log")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.end()


@pytest.mark.parametrize(
    ("count", "frontends"),
    [(FEW, 1), pytest.param(MANY, 1, marks=pytest.mark.chaos), pytest.param(MANY, 2, marks=pytest.mark.chaos)],
)
def test_memory_is_flat_and_nothing_is_left(
    worker: WorkerProcess, capfd: pytest.CaptureFixture[str], count: int, frontends: int
) -> None:
    flags = (f"--worker=127.0.0.1:{worker.port}", f"--frontends={frontends}", "--preemption-mode=swap")
    with scheduler(*flags, "--log-level=warning") as service:
        service.wait_until_ready()
        asyncio.run(_soak(service, worker, count))
        wait_until_nothing_is_left(service.address)
    assert service.process.returncode == 0
    said = capfd.readouterr()
    assert '"level": "error"' not in said.err, f"the scheduler had a fault of its own: {said.err}"
    assert '"level": "error"' not in worker.log.read_text()
    print(said.out)


async def _soak(service: Service, worker: WorkerProcess, count: int) -> None:
    processes = {"scheduler": Process(service.process.pid), "worker": Process(worker.pid)}
    soak = Soak(service.address)
    await soak.send(NUM_WARM_UP)
    handles = {name: process.handles for name, process in processes.items()}
    num_samples = min(MOST_SAMPLES, count // 10)
    for number in range(1, num_samples + 1):
        await soak.send(count // num_samples)
        for process in processes.values():
            process.sample(number * count // num_samples)
    for name, process in processes.items():
        steady = process.steady_growth
        print(f"{count} requests, {dict(soak.ends)}; {name}: {process.tell()}, {steady:+.0f} in every part")
        assert steady < MOST_STEADY_BYTES_A_REQUEST[count], f"{name} grows with every request"
        assert process.growth_bytes < MOST_BYTES_OF_NOISE + MOST_BYTES_A_REQUEST * count, f"{name} grows"
        gc.collect()  # cycles of cancelled calls hold connections on this side
        await process.wait_for_handles(handles[name])


class Soak:
    """A crowd of clients. What they do follows from the seed; when, from the machine."""

    def __init__(self, address: str, seed: int = 1) -> None:
        self.ends: Counter[str] = Counter()  # fates with the statuses that they came to
        self._address = address
        self._chance = random.Random(seed)
        self._prompts = [self._prompt() for _ in range(NUM_PROMPTS)]

    async def send(self, count: int) -> None:
        """So many requests, some at once, over a connection of their own."""
        left = iter(range(count))
        async with grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def client() -> None:
                for _ in left:
                    await self._one(stub, self._chance.choice(FATES))

            await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def _one(self, stub: inference_pb2_grpc.InferenceStub, fate: str) -> None:
        request, patience = self._request(), self._chance.randrange(6)
        timeout = self._chance.uniform(0.001, 0.2) if fate == "deadline" else 120.0
        call = stub.Generate(request, timeout=timeout)
        responses: list[pb.GenerateResponse] = []
        try:
            while fate != "unread" and (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)
                if len(responses) > patience:
                    if fate == "cancel":
                        break
                    if fate == "abort":
                        await stub.Abort(pb.AbortRequest(request_id=request.request_id))
            if fate in ("cancel", "unread"):
                await asyncio.sleep(0.002 * patience)
                call.cancel()
        except grpc.aio.AioRpcError:
            pass
        status = await call.code()
        self.ends[f"{fate} {status.name}"] += 1
        if fate in ("read", "abort"):
            assert status is grpc.StatusCode.OK, await call.details()
            _check(request, responses, may_be_aborted=fate == "abort")
        elif fate == "deadline":
            assert status in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED), await call.details()
        else:
            assert status in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED), await call.details()

    def _prompt(self) -> str:
        return self._chance.choice(["", SHARED]) + "".join(
            self._chance.choices("abcdefgh ", k=self._chance.randint(1, 60))
        )

    def _request(self) -> pb.GenerateRequest:
        chance = self._chance
        prompt = chance.choice(self._prompts)
        params = pb.SamplingParams(max_tokens=chance.randint(1, 40), ignore_eos=True)
        match chance.randrange(6):
            case 0:
                params.n = chance.randint(2, 4)
            case 1:
                params.use_beam_search, params.best_of, params.temperature = True, 3, 0
            case 2:
                params.stop.extend(chance.choices("abcdefgh", k=3))
            case 3:
                params.logprobs = 5
            case _:
                params.temperature = chance.choice([0.0, 1.0])
        request_id = f"{chance.getrandbits(64):x}"
        return pb.GenerateRequest(
            request_id=request_id, prompt=prompt, sampling_params=params, stream=chance.random() < 0.8
        )


def _check(request: pb.GenerateRequest, responses: list[pb.GenerateResponse], may_be_aborted: bool) -> None:
    """Every output has ended once, and well."""
    params = request.sampling_params
    deltas = [delta for response in responses for delta in response.outputs if delta.finish_reason]
    assert sorted(delta.index for delta in deltas) == list(range(params.n or 1))
    good = {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH} | ({pb.FINISH_REASON_ABORT} if may_be_aborted else set())
    assert {delta.finish_reason for delta in deltas} <= good, responses[-1]
    assert responses[-1].usage.completion_tokens <= params.max_tokens * (params.best_of or params.n or 1)
