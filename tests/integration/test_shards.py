"""`--shards 2` with real processes: one server to clients and operators, also when a shard is killed in the middle."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from octavo import AsyncClient, SamplingParams
from octavo.bench.fleet.replay import Replay
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.flight.record_file import read
from scheduler_svc.shards.shard_reporter import INTERVAL_S
from tests.chaos.worker_process import WorkerProcess
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler
from tests.integration.test_worker_loss import RealWorkers
from tests.oracle import GreedyOracle
from tests.processes import is_alive
from tests.tiny_models import make_tiny_llama

DEADLINE_S = 30.0
KILLED_WITHIN_S = 20.0  # 7 s are promised of a shard that hangs
NUM_REQUESTS = 32
MODEL_LEN = 1200  # more than any test waits for
ONE = pb.SamplingParams(max_tokens=1)
KINDS: dict[str, pb.SamplingParams] = {
    "greedy": pb.SamplingParams(temperature=0.0),
    "drawn": pb.SamplingParams(logprobs=2),
    "several": pb.SamplingParams(n=3),
    "best of": pb.SamplingParams(n=2, best_of=3),
    "beams": pb.SamplingParams(temperature=0.0, use_beam_search=True, n=2, best_of=3),
    "prompt logprobs": pb.SamplingParams(prompt_logprobs=1),
    "stop strings": pb.SamplingParams(stop=["zzzz", "qqqq"]),
    "one message": pb.SamplingParams(),
}


@dataclass
class Sharded:
    service: Service
    metrics_port: int
    inference: inference_pb2_grpc.InferenceStub
    control: inference_pb2_grpc.ControlStub

    def shards(self) -> list[psutil.Process]:
        return self.service.children("scheduler_svc.shards.shard_process")

    async def until(self, what: str, is_so: Callable[[pb.Load], bool]) -> pb.Load:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so(load := await self.control.GetLoad(pb.GetLoadRequest(), wait_for_ready=True)):
            assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s: {load}"
            await asyncio.sleep(0.02)
        return load

    async def until_both_serve(self) -> None:
        """And requests come to both: frontends have heard of them."""
        load = await self.until("both workers", lambda load: _num_serving(load) == 2)
        before = {worker.address: worker.num_steps for worker in load.workers}
        deadline = time.monotonic() + DEADLINE_S
        while [worker.address for worker in load.workers if worker.num_steps == before[worker.address]]:
            assert time.monotonic() < deadline, f"one gets no requests: {load}"
            prompts = [f"{time.monotonic_ns()} {number}|" + "y" * 150 for number in range(4)]  # that take some time
            await asyncio.gather(
                *(answer_to(self.inference, pb.GenerateRequest(prompt=p, sampling_params=ONE)) for p in prompts)
            )
            load = await self.control.GetLoad(pb.GetLoadRequest())

    def counters(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = re.findall(r"^(\w+:\w+(?:{[^}]*})?) (\S+)$", answer.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in lines}


def _num_serving(load: pb.Load) -> int:
    return sum(worker.health == pb.WORKER_HEALTH_SERVING for worker in load.workers)


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Service, int]]:
    port = free_port()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                FakeWorker(
                    delay_s=0.02,
                    num_blocks=4096,
                    max_model_len=MODEL_LEN,
                    max_num_seqs=32,
                    max_num_batched_tokens=512,
                    prefill_tokens_per_s=1e4,
                )
            )
            for _ in range(2)
        ]
        flags = [f"--worker={worker.address}" for worker in workers]
        it = stack.enter_context(scheduler(*flags, "--shards=2", "--max-waiting-requests=64", f"--metrics-port={port}"))
        it.wait_until_ready()
        yield it, port


@pytest.fixture
async def sharded(service: tuple[Service, int]) -> AsyncIterator[Sharded]:
    it, port = service
    async with grpc.aio.insecure_channel(it.address) as channel:
        both = Sharded(it, port, inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel))
        await both.until_both_serve()
        yield both


def request_of(number: int, max_tokens: int = 60) -> pb.GenerateRequest:
    kind = list(KINDS)[number % len(KINDS)]
    request = pb.GenerateRequest(request_id=f"{kind} {number}", prompt=f"say {number}|" + "x" * (7 * number))
    request.sampling_params.CopyFrom(KINDS[kind])
    request.sampling_params.max_tokens, request.sampling_params.seed = max_tokens, number
    request.sampling_params.ignore_eos = True
    request.stream = kind != "one message"
    return request


@dataclass
class Answer:
    outputs: dict[int, pb.OutputDelta]
    prompt_logprobs: list[str]
    times_moved: int
    arrivals_s: list[float] = field(default_factory=list)  # of its messages, by `time.monotonic`

    def plain(self) -> dict[int, str]:
        """What a client has of each output, without how it was spread over messages."""
        return {index: str(output) for index, output in sorted(self.outputs.items())}


async def answer_to(stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> Answer:
    answer = Answer({}, [], 0)
    async for message in stub.Generate(request):
        answer.arrivals_s.append(time.monotonic())
        answer.prompt_logprobs += map(str, message.prompt_logprobs)
        answer.times_moved = message.timings.times_moved
        for delta in message.outputs:
            text = answer.outputs[delta.index].text if delta.index in answer.outputs else ""
            whole = answer.outputs.setdefault(delta.index, pb.OutputDelta())
            whole.MergeFrom(delta)
            whole.text = text + delta.text
    return answer


def _end_of_pause(arrivals_s: list[float], since_s: float) -> float:
    """What was on its way already when a shard was stopped ends no pause."""
    times_s = [since_s, *(arrival_s for arrival_s in arrivals_s if arrival_s > since_s)]
    return max(itertools.pairwise(times_s), key=lambda pair: pair[1] - pair[0])[1]


@asynccontextmanager
async def one_shard() -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    with FakeWorker(num_blocks=2048, max_model_len=MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=1024) as worker:
        with scheduler(f"--worker={worker.address}") as alone:
            alone.wait_until_ready()
            async with grpc.aio.insecure_channel(alone.address) as channel:
                yield inference_pb2_grpc.InferenceStub(channel)


async def test_operators_and_clients_see_one_scheduler(sharded: Sharded) -> None:
    params = pb.SamplingParams(max_tokens=1000, ignore_eos=True)  # 20 s, and all are aborted before
    prompts = {f"r{n}": f"{n}|" + "y" * 100 for n in range(12)}
    calls = [
        sharded.inference.Generate(pb.GenerateRequest(request_id=request_id, prompt=prompt, sampling_params=params))
        for request_id, prompt in prompts.items()
    ]
    for call in calls:
        await call.read()
    load = await sharded.until("all run", lambda load: load.num_requests_running == 12)
    assert all(worker.num_running for worker in load.workers), "they are spread over both shards"  # by measured speed
    ids, token = list[str](), ""
    while token or not ids:
        page = await sharded.control.ListRequests(pb.ListRequestsRequest(page_size=5, page_token=token))
        assert len(page.requests) <= 5
        ids += [state.request_id for state in page.requests]
        token = page.next_page_token
    assert sorted(ids) == sorted(f"r{n}" for n in range(12))
    for address in [worker.address for worker in load.workers]:
        blocks = await sharded.control.GetBlocks(pb.GetBlocksRequest(worker=address))
        assert {block.worker for block in blocks.blocks} == {address}
    seen, token = set[tuple[str, int]](), ""
    while token or not seen:
        blocks = await sharded.control.GetBlocks(pb.GetBlocksRequest(page_size=4, page_token=token))
        seen |= {(block.worker, block.block_id) for block in blocks.blocks}
        token = blocks.next_page_token
    assert {worker for worker, _ in seen} == {worker.address for worker in load.workers}
    view = await sharded.control.GetView(pb.GetViewRequest(max_requests=9))
    assert len(view.requests) == 9 and view.has_more_requests and view.load.num_requests_running == 12
    assert {pool.worker for pool in view.pools} == {worker.address for worker in load.workers}
    withheld = pb.WithholdBlocksRequest(worker=load.workers[0].address, num_blocks=10**6)
    with pytest.raises(grpc.aio.AioRpcError, match="num_blocks: got 1000000; accepted: 0 to"):
        await sharded.control.WithholdBlocks(withheld)
    steps = sharded.control.WatchSteps(pb.WatchStepsRequest())
    watched: set[str] = set()
    while len(watched) < 2:
        step: pb.StepSummary = await asyncio.wait_for(steps.read(), DEADLINE_S)
        watched.add(step.worker)
    steps.cancel()
    for asked in (sharded.control.GetBlocks(pb.GetBlocksRequest(worker="nobody:1")),):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asked
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    # An id is one, wherever it runs: it is live, found, replaced and aborted.
    again = pb.GenerateRequest(request_id="r3", prompt="|", sampling_params=params)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await sharded.inference.Generate(again).read()
    assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert (await sharded.control.GetRequest(pb.GetRequestRequest(request_id="r3"))).request_id == "r3"
    again.attempt = 1
    replacing = sharded.inference.Generate(again)
    assert (await replacing.read()).request_id == "r3"
    for number in range(12):
        assert (await sharded.inference.Abort(pb.AbortRequest(request_id=f"r{number}"))).found
    for call in (*calls, replacing):
        last = None
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message
        assert last is not None and last.outputs[0].finish_reason == pb.FINISH_REASON_ABORT
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await sharded.control.GetRequest(pb.GetRequestRequest(request_id="r3"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await sharded.until("nothing runs", lambda load: not load.num_requests_running)
    counters = await asyncio.to_thread(sharded.counters)
    aborted = [value for name, value in counters.items() if "request_success" in name and '"abort"' in name]
    assert sum(aborted) == 13
    for shard in ('shard="0"', 'shard="1"'):
        assert any(name.startswith("octavo:kv_cache_usage_perc") and shard in name for name in counters)


async def test_the_flight_record_is_a_file_for_each_shard_and_each_is_decided_alike(
    sharded: Sharded, tmp_path: Path
) -> None:
    params, files = pb.SamplingParams(max_tokens=20, ignore_eos=True), dict[int, bytes]()
    calls = [sharded.inference.Generate(pb.GenerateRequest(prompt=f"{n} |", sampling_params=params)) for n in range(6)]
    for call in calls:
        while await call.read() is not grpc.aio.EOF:
            pass
    async for piece in sharded.control.DumpFlightRecord(pb.DumpFlightRecordRequest()):
        files[piece.shard] = files.get(piece.shard, b"") + piece.data
    assert sorted(files) == [0, 1]
    for data in files.values():
        (tmp_path / "record").write_bytes(data)
        record = read(tmp_path / "record")
        outcome = Replay(record).run()
        assert outcome.difference is None and outcome.num_same == record.num_steps > 0


async def test_a_prompt_goes_where_its_prefix_is_cached(sharded: Sharded) -> None:
    await sharded.control.FlushPrefixCache(pb.FlushPrefixCacheRequest())
    params = pb.SamplingParams(max_tokens=2, ignore_eos=True)
    cached = []
    for number in range(8):
        prompt = "a long beginning that all of them have " * 4 + f"and {number}"
        call = sharded.inference.Generate(pb.GenerateRequest(prompt=prompt, sampling_params=params))
        messages = [message async for message in call]
        cached.append(messages[-1].usage.cached_tokens)
        if not number:
            await asyncio.sleep(10 * INTERVAL_S)  # until it is reported; whatever follows is cached beside it
    assert cached[0] == 0 and min(cached[1:]) > 128, "seven of eight find it, though the other shard is as idle"


async def test_a_killed_shard_costs_a_pause_and_no_token(sharded: Sharded) -> None:
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    async with one_shard() as alone:
        undisturbed = await asyncio.gather(*(answer_to(alone, request) for request in requests))
    before = await asyncio.to_thread(sharded.counters)
    running = [asyncio.create_task(answer_to(sharded.inference, request)) for request in requests]
    await sharded.until("all run", lambda load: load.num_requests_running >= NUM_REQUESTS - 2)
    await asyncio.sleep(0.3)
    victim, other = sharded.shards()
    victim.kill()
    disturbed = await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)
    assert any(answer.times_moved for answer in disturbed), "none was in the shard that was killed"
    assert not all(answer.times_moved for answer in disturbed), "all were"
    for request, ours, theirs in zip(requests, disturbed, undisturbed, strict=True):
        assert ours.plain() == theirs.plain(), request.request_id
        assert ours.prompt_logprobs == theirs.prompt_logprobs, request.request_id
    await sharded.until_both_serve()
    assert victim.pid not in [shard.pid for shard in sharded.shards()] and len(sharded.shards()) == 2
    assert other.pid in [shard.pid for shard in sharded.shards()]
    after = await asyncio.to_thread(sharded.counters)
    fallen = [name for name, value in before.items() if name.endswith("_total") and after[name] < value]
    assert not fallen, "what the lost shard had counted was forgotten"
    load = await sharded.until("nothing is left", lambda load: not load.num_requests_running)
    for worker in load.workers:
        assert worker.num_free_device_blocks == worker.num_device_blocks


async def test_a_stopped_shard_is_gone_on_without_and_then_killed(sharded: Sharded) -> None:
    """Its connections live, and nobody answers on them."""
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    undisturbed = await asyncio.gather(*(answer_to(sharded.inference, request) for request in requests))
    running = [asyncio.create_task(answer_to(sharded.inference, request)) for request in requests]
    await sharded.until("all run", lambda load: load.num_requests_running >= NUM_REQUESTS - 2)
    victim, _ = sharded.shards()
    victim.suspend()
    stopped_s = time.monotonic()
    while is_alive(victim):
        assert time.monotonic() < stopped_s + KILLED_WITHIN_S, "it is left as it is"
        await asyncio.sleep(0.05)
    killed_s = time.monotonic()
    disturbed = await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)
    moved = [answer for answer in disturbed if answer.times_moved]
    assert moved, "none was in the shard that was stopped"
    went_on_s = sorted(_end_of_pause(answer.arrivals_s, stopped_s) - stopped_s for answer in moved)
    print(f"the first went on after {went_on_s[0]:.2f} s; it was killed after {killed_s - stopped_s:.2f} s")
    assert stopped_s + went_on_s[0] < killed_s, "requests wait until it is killed"
    for request, ours, theirs in zip(requests, disturbed, undisturbed, strict=True):
        assert ours.plain() == theirs.plain(), request.request_id
        assert ours.prompt_logprobs == theirs.prompt_logprobs, request.request_id
    await sharded.until_both_serve()
    await sharded.until("nothing is left", lambda load: not load.num_requests_running)


async def test_real_workers_go_on_with_what_a_killed_shard_had(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Beside one shard that stays: all draws of a model, in steps that are composed otherwise."""
    workers = RealWorkers(make_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs"))
    flags = [*(f"--worker={address}" for address in workers.workers), "--shards=2", "--metrics-port=0"]
    try:
        with scheduler(*flags) as it:
            await asyncio.to_thread(it.wait_until_ready)
            async with grpc.aio.insecure_channel(it.address) as channel:
                inference = inference_pb2_grpc.InferenceStub(channel)
                both = Sharded(it, 0, inference, inference_pb2_grpc.ControlStub(channel))
                await both.until_both_serve()
                requests = [request_of(number, max_tokens=80) for number in range(NUM_REQUESTS)]
                undisturbed = await asyncio.gather(*(answer_to(inference, request) for request in requests))
                running = [asyncio.create_task(answer_to(inference, request)) for request in requests]
                await both.until("some run", lambda load: load.num_requests_running >= 6)  # of 16 slots
                both.shards()[0].kill()
                disturbed = await asyncio.wait_for(asyncio.gather(*running), 2 * DEADLINE_S)
    finally:
        workers.stop()
    assert any(answer.times_moved for answer in disturbed)
    for request, ours, theirs in zip(requests, disturbed, undisturbed, strict=True):
        # Logprobs, too, bit for bit: on a CPU a row's logits depend on nothing in its batch.
        assert ours.plain() == theirs.plain(), request.request_id
        assert ours.prompt_logprobs == theirs.prompt_logprobs, request.request_id


async def test_two_models_over_shards_each_get_their_own_tokens_also_when_a_shard_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One worker of each: the shards serve different models, and a killed one's is waited for by new requests, too."""
    root, logs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("logs")
    folders = {"a": make_tiny_llama(root / "a", seed=1), "b": make_tiny_llama(root / "b", seed=2)}
    options = ["--num-threads=1", "--max-model-len=256", "--max-num-seqs=8", "--kv-cache-memory=0.02", "--swap-space=0"]
    workers = [WorkerProcess([f"--model={folders[name]}", *options], logs / name) for name in folders]
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait_until_ready)
        flags = [*(f"--worker=127.0.0.1:{worker.port}" for worker in workers), "--shards=2", "--metrics-port=0"]
        with scheduler(*flags) as it:
            await asyncio.to_thread(it.wait_until_ready)
            async with grpc.aio.insecure_channel(it.address) as channel, AsyncClient(it.address) as client:
                inference = inference_pb2_grpc.InferenceStub(channel)
                both = Sharded(it, 0, inference, inference_pb2_grpc.ControlStub(channel))
                await both.until("both workers", lambda load: _num_serving(load) == 2)
                async with asyncio.timeout(DEADLINE_S):
                    while len(states := (await inference.ListModels(pb.ListModelsRequest())).models) < 2:
                        await asyncio.sleep(0.02)  # until the frontend has heard of both
                assert sorted((state.name, state.num_workers_serving) for state in states) == [("a", 1), ("b", 1)]

                async def read(number: int) -> list[int]:
                    """By the client library, as a request is sent again where its model is not known yet."""
                    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
                    token_ids: list[int] = []
                    prompt = list(range(number, number + 9))
                    async for output in client.generate(
                        prompt_token_ids=prompt, sampling_params=params, model="ab"[number % 2]
                    ):
                        token_ids += output.outputs[0].token_ids
                    return token_ids

                running = [asyncio.create_task(read(number)) for number in range(12)]
                await both.until("all run", lambda load: load.num_requests_running >= 10)
                both.shards()[0].kill()
                late = [asyncio.create_task(read(number)) for number in (0, 1)]
                answers = await asyncio.wait_for(asyncio.gather(*running, *late), 2 * DEADLINE_S)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await answer_to(inference, pb.GenerateRequest(model="c", prompt="x", sampling_params=ONE))
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND, "once all is known again"
    finally:
        for worker in workers:
            worker.end()
    oracles = {name: GreedyOracle(folder) for name, folder in folders.items()}
    for number, token_ids in zip([*range(12), 0, 1], answers, strict=True):
        oracle, prompt = oracles["ab"[number % 2]], list(range(number, number + 9))
        oracle.check(prompt, oracle.generate(prompt, 90, eos_token_id=None), token_ids, f"request {number}")


async def test_a_shard_that_comes_back_has_the_adapters_and_sigterm_lets_requests_end() -> None:
    params = pb.SamplingParams(max_tokens=20, ignore_eos=True)
    with FakeWorker(delay_s=0.02, max_loras=2) as first, FakeWorker(delay_s=0.02, max_loras=2) as second:
        workers = [f"--worker={worker.address}" for worker in (first, second)]
        with scheduler(*workers, "--shards=2", "--metrics-port=0") as it:
            await asyncio.to_thread(it.wait_until_ready)
            async with grpc.aio.insecure_channel(it.address) as channel:
                inference = inference_pb2_grpc.InferenceStub(channel)
                both = Sharded(it, 0, inference, inference_pb2_grpc.ControlStub(channel))
                await both.until("both workers", lambda load: _num_serving(load) == 2)
                load = pb.ControlLoadAdapterRequest(name="one", path="/adapters/one")
                await both.control.LoadAdapter(load)
                killed = both.shards()[0]
                killed.kill()
                # Whether its worker is seen to be away depends on who had it: a shard that is slow to start has none.
                has_it = lambda load: (  # noqa: E731
                    killed not in both.shards()
                    and len(both.shards()) == 2
                    and [list(worker.adapters) for worker in load.workers] == [["one"]] * 2
                )
                await both.until("the adapter at both", has_it)
                requests = [
                    pb.GenerateRequest(prompt=f"{n}|" + "y" * 100, adapter="one", sampling_params=params)
                    for n in range(4)
                ]
                for answer in await asyncio.gather(*(answer_to(inference, request) for request in requests)):
                    assert len(answer.outputs[0].token_ids) == 20
                await both.control.UnloadAdapter(pb.ControlUnloadAdapterRequest(name="one"))
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await answer_to(inference, requests[0])
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND
                last = asyncio.create_task(answer_to(inference, pb.GenerateRequest(prompt="|", sampling_params=params)))
                await both.until("it runs", lambda load: load.num_requests_running == 1)
                it.process.terminate()
                assert len((await last).outputs[0].token_ids) == 20
            assert await asyncio.to_thread(it.process.wait, 10) == 0
