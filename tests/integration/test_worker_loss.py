"""A worker is lost in the middle of a request of several sequences, or of logprobs: the answer is as if it were not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import grpc
import pytest

from octavo import SamplingParams
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.worker_process import WorkerProcess
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler
from tests.tiny_models import make_tiny_llama

PROMPT = "|a prompt of several blocks"
LOST_AFTER = 12  # tokens of each sequence
TOLERANCE = 1e-4
NUM_SEQUENCES = {"n": 4, "best_of": 4, "beams": 4, "logprobs": 1}


def sampling(kind: str, max_tokens: int) -> SamplingParams:
    options = {
        "n": {"temperature": 1, "seed": 3, "n": 4},
        "best_of": {"temperature": 1, "seed": 4, "n": 2, "best_of": 4},
        "beams": {"temperature": 0, "use_beam_search": True, "n": 4, "best_of": 4},
        "logprobs": {"temperature": 1, "seed": 5, "logprobs": 3},
    }[kind]
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]  # any field


class Workers(Protocol):
    """Two workers, by address, of which one at a time is lost and comes back; `max_tokens` take them some time."""

    max_tokens: int

    def lose(self, address: str) -> None: ...

    def bring_back(self, address: str) -> None: ...


class FakeWorkers:
    max_tokens = 40

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        for _ in range(2):
            self.bring_back(f"127.0.0.1:{free_port()}")

    def bring_back(self, address: str) -> None:
        worker = FakeWorker(port=int(address.rpartition(":")[2]), delay_s=0.01, num_blocks=256, max_num_seqs=8)
        self.workers[address] = worker.__enter__()

    def lose(self, address: str) -> None:
        self.workers[address].kill()

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.__exit__(None)


class RealWorkers:
    max_tokens = 200

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder, self._logs = folder, logs
        self._num_started = 0
        self.workers: dict[str, WorkerProcess] = {}
        for _ in range(2):
            self.bring_back(f"127.0.0.1:{free_port()}")

    def bring_back(self, address: str) -> None:
        options = ["--max-model-len=256", "--max-num-seqs=8", "--kv-cache-memory=0.02", "--swap-space=0"]
        arguments = [f"--model={self._folder}", f"--port={address.rpartition(':')[2]}", "--num-threads=1", *options]
        self._num_started += 1
        self.workers[address] = WorkerProcess(arguments, self._logs / f"worker-{self._num_started}.log")

    def lose(self, address: str) -> None:
        self.workers[address].send_signal(signal.SIGKILL)
        self.workers[address].wait_for_end()

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.end()


@pytest.fixture(scope="module", params=["fake workers", "real workers"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Workers]]:
    with ExitStack() as stack:
        if request.param == "fake workers":
            workers: FakeWorkers | RealWorkers = FakeWorkers()
        else:
            workers = RealWorkers(make_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs"))
        stack.callback(workers.stop)
        it = stack.enter_context(scheduler(*(f"--worker={address}" for address in workers.workers)))
        yield it, workers


Answer = tuple[list[pb.OutputDelta], pb.GenerateResponse]


class Calls:
    """What a client and an operator ask of the service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference = inference_pb2_grpc.InferenceStub(channel)
        self._control = inference_pb2_grpc.ControlStub(channel)

    async def run(self, request: pb.GenerateRequest) -> Answer:
        """Every output in one delta, and the last message."""
        outputs: dict[int, pb.OutputDelta] = {}
        async for response in self._inference.Generate(request):
            for delta in response.outputs:
                whole = outputs.setdefault(delta.index, pb.OutputDelta())
                text = whole.text + delta.text
                whole.MergeFrom(delta)
                whole.text = text
        return [outputs[index] for index in sorted(outputs)], response

    async def until_both_serve(self) -> None:
        while True:
            workers = (await self._control.ListWorkers(pb.ListWorkersRequest(), wait_for_ready=True)).workers
            if [worker.health for worker in workers] == [pb.WORKER_HEALTH_SERVING] * 2:
                return
            await asyncio.sleep(0.02)

    async def begin(self, request: pb.GenerateRequest, num_sequences: int) -> tuple[asyncio.Task[Answer], str]:
        """A run, and the worker that runs it once all its sequences have some tokens. Whoever asks may come too late
        for a tiny model on a busy machine: then it is run again."""
        while True:
            running = asyncio.create_task(self.run(request))
            if (address := await self._on_its_way(request.request_id, num_sequences, running)) is not None:
                return running, address
            await running

    async def _on_its_way(self, request_id: str, num_sequences: int, running: asyncio.Task[Answer]) -> str | None:
        while not running.done():
            try:
                state = await self._control.GetRequest(pb.GetRequestRequest(request_id=request_id))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
                await asyncio.sleep(0.005)
                continue
            least = state.num_prompt_tokens + LOST_AFTER
            if [sequence.num_tokens >= least for sequence in state.sequences] == [True] * num_sequences:
                return state.worker
            await asyncio.sleep(0.005)
        return None


@pytest.mark.parametrize("kind", NUM_SEQUENCES)
async def test_a_request_whose_worker_is_lost_ends_as_if_it_were_not(pool: tuple[Service, Workers], kind: str) -> None:
    service, workers = pool
    request = pb.GenerateRequest(request_id=kind, prompt=PROMPT)
    request.sampling_params.CopyFrom(sampling(kind, workers.max_tokens).to_proto())
    async with asyncio.timeout(150), grpc.aio.insecure_channel(service.address) as channel:
        calls = Calls(channel)
        await calls.until_both_serve()
        undisturbed, last = await calls.run(request)
        assert last.timings.times_moved == 0
        for _ in range(10):
            running, address = await calls.begin(request, NUM_SEQUENCES[kind])
            await asyncio.to_thread(workers.lose, address)
            disturbed, last = await running
            workers.bring_back(address)
            if last.timings.times_moved:
                break
            await calls.until_both_serve()  # it had ended before it was lost
        assert last.timings.times_moved == 1, "it was meant to be lost in the middle"
    assert len(undisturbed) == (request.sampling_params.n or 1)
    assert len({tuple(output.token_ids) for output in undisturbed}) == len(undisturbed)
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids) and len(ours.token_ids) == workers.max_tokens
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        sums = (theirs.score, theirs.cumulative_logprob)
        assert (ours.score, ours.cumulative_logprob) == pytest.approx(sums, abs=workers.max_tokens * TOLERANCE)
        assert_same_logprobs(ours, theirs)


@pytest.mark.parametrize("pool", ["real workers"], indirect=True)
async def test_workers_that_are_told_to_end_together_end_what_runs_first(pool: tuple[Service, Workers]) -> None:
    """SIGTERM without a `Drain`: the request moves from the first to the last one, and is finished there."""
    service, workers = pool
    assert isinstance(workers, RealWorkers)  # which take signals
    request = pb.GenerateRequest(request_id="ended", prompt=PROMPT)
    request.sampling_params.CopyFrom(sampling("logprobs", workers.max_tokens).to_proto())
    async with asyncio.timeout(150), grpc.aio.insecure_channel(service.address) as channel:
        calls = Calls(channel)
        await calls.until_both_serve()
        undisturbed, _ = await calls.run(request)
        running, first = await calls.begin(request, 1)
        for address in sorted(workers.workers, key=lambda address: address != first):
            workers.workers[address].send_signal(signal.SIGTERM)
        disturbed, _ = await running
        assert [list(output.token_ids) for output in disturbed] == [list(output.token_ids) for output in undisturbed]
        assert disturbed[0].finish_reason == pb.FINISH_REASON_LENGTH
        for address in list(workers.workers):
            await asyncio.to_thread(workers.workers[address].wait_for_end)
            workers.bring_back(address)
        await calls.until_both_serve()


def assert_same_logprobs(ours: pb.OutputDelta, theirs: pb.OutputDelta) -> None:
    assert len(ours.logprobs) == len(theirs.logprobs)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert (mine.token.token_id, mine.token.rank) == (other.token.token_id, other.token.rank)
        assert [top.token_id for top in mine.top] == [top.token_id for top in other.top] and len(mine.top) == 3
        values = [top.logprob for top in (other.token, *other.top)]
        assert [top.logprob for top in (mine.token, *mine.top)] == pytest.approx(values, abs=TOLERANCE)
