"""Real workers of two models behind one scheduler: one is rolled over under load, all get their own model's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo import AsyncClient, SamplingParams
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.worker_process import WorkerProcess
from tests.integration.scheduler_process import Service, scheduler
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama
from tests.worker.families import make_family

DEADLINE_S = 60.0
NUMBERS = random.Random(5)
PROMPTS = [NUMBERS.choices(range(256), k=length) for length in (1, 9, 40, 90)]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two revisions of `a`, a Llama, and `b`, a Qwen2 of other sizes and another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return {
        "old": make_tiny_llama(root / "old" / "a", seed=1),
        "new": make_tiny_llama(root / "new" / "a", seed=2),
        "b": make_family("qwen2", root / "b"),
    }


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, GreedyOracle]:
    return {name: GreedyOracle(folder) for name, folder in folders.items()}


@dataclass
class Answer:
    """What came of one request: of which model, with which tokens, and when it was sent."""

    fingerprint: str
    prompt: list[int]
    token_ids: list[int]
    sent_s: float


@dataclass
class Clients:
    """Connections of their own, so that every frontend has some."""

    stubs: list[inference_pb2_grpc.InferenceStub]
    answers: list[Answer] = field(default_factory=list)
    has_stopped: bool = False

    async def ask(self, stub: int, model: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Answer:
        """Raises AioRpcError for a refusal: nobody is refused here."""
        answer = Answer("", prompt, [], time.monotonic())
        request = pb.GenerateRequest(
            model=model,
            prompt_token_ids=pb.TokenIds(ids=prompt),
            sampling_params=pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
        )
        async for response in self.stubs[stub].Generate(request, timeout=DEADLINE_S):
            answer.fingerprint = answer.fingerprint or response.model_fingerprint
            for output in response.outputs:
                assert output.finish_reason in (0, pb.FINISH_REASON_LENGTH), output
                answer.token_ids += output.token_ids
        assert len(answer.token_ids) == max_tokens
        self.answers.append(answer)
        return answer

    async def load(self, stub: int, model: str) -> None:
        """One request after another."""
        for prompt in itertools.cycle(PROMPTS):
            if self.has_stopped:
                return
            await self.ask(stub, model, prompt)

    async def models(self) -> dict[str, pb.ModelState]:
        states = (await self.stubs[0].ListModels(pb.ListModelsRequest())).models
        return {state.fingerprint: state for state in states}


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (await outcome if asyncio.iscoroutine(outcome := holds()) else outcome):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


Pool = tuple[Service, dict[str, str], Callable[[str], None], dict[str, WorkerProcess]]


# With one frontend, which is the core itself, it is part of `make chaos`: what else it shows, it shows with two, too.
@pytest.fixture(params=[pytest.param("--frontends=1", marks=pytest.mark.chaos), "--frontends=2"])
def pool(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Iterator[Pool]:
    """A scheduler that knows the addresses of all three workers, of which `old` and `b` run, and what starts one."""
    workers: dict[str, WorkerProcess] = {}
    addresses = {name: f"127.0.0.1:{free_port()}" for name in folders}
    with ExitStack() as stack:

        def start(name: str) -> None:
            port = addresses[name].rpartition(":")[2]
            arguments = [
                f"--model={folders[name]}",
                f"--port={port}",
                "--num-threads=1",
                "--max-model-len=256",
                "--max-num-seqs=16",
                "--kv-cache-memory=0.02",
                "--swap-space=0",
            ]
            worker = WorkerProcess(arguments, tmp_path / f"{name}.log")
            stack.callback(worker.end)
            worker.wait_until_ready()
            workers[name] = worker

        for name in ("old", "b"):
            start(name)
        flags = [f"--worker={address}" for address in addresses.values()]
        it = stack.enter_context(scheduler(*flags, request.param, "--worker-wait-timeout=2"))
        it.wait_until_ready()
        yield it, addresses, start, workers


async def test_a_model_is_rolled_over_under_load(pool: Pool, oracles: dict[str, GreedyOracle]) -> None:
    service, addresses, start, workers = pool
    async with grpc.aio.insecure_channel(service.address) as channel:
        control = inference_pb2_grpc.ControlStub(channel)
        channels = [
            grpc.aio.insecure_channel(service.address, options=[("grpc.use_local_subchannel_pool", 1)])
            for _ in range(6)
        ]
        clients = Clients([inference_pb2_grpc.InferenceStub(each) for each in channels])
        await until(lambda: _has(clients, 2))
        before = await clients.models()
        (old,) = (each for each in before.values() if each.name == "a")
        (b,) = (each for each in before.values() if each.name == "b")
        assert old.is_current and b.is_current and b.architecture == "Qwen2ForCausalLM"
        load = [asyncio.create_task(clients.load(stub, model)) for stub, model in enumerate(["a", "b"] * 3)]
        await until(lambda: len(clients.answers) > 12)

        await asyncio.to_thread(start, "new")
        await until(lambda: _has(clients, 3))
        (new,) = (each for each in (await clients.models()).values() if each.fingerprint not in before)
        assert (new.name, new.is_current) == ("a", True)
        switched_s, so_far = time.monotonic(), len(clients.answers)
        await until(lambda: _runs(control, addresses["old"], 0))  # what it had; what runs from now on is late
        late = [asyncio.create_task(clients.ask(n, f"a@{old.fingerprint[:12]}", PROMPTS[2], 150)) for n in range(6)]
        await until(lambda: _runs(control, addresses["old"], 6))
        await control.Drain(pb.DrainRequest(worker=addresses["old"]))
        await asyncio.gather(*late)  # of the old one's last worker: they end on it
        await until(lambda: len(clients.answers) > so_far + 18)
        clients.has_stopped = True
        await asyncio.gather(*load)

        await until(lambda: _has(clients, 2))
        assert old.fingerprint not in await clients.models()
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await clients.ask(0, f"a@{old.fingerprint}", PROMPTS[0])
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        for each in channels:
            await each.close()
    await _check_restart(service, workers["b"], oracles)

    names = {old.fingerprint: "old", new.fingerprint: "new", b.fingerprint: "b"}
    expected: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for answer in clients.answers:
        name, key = names[answer.fingerprint], (answer.fingerprint, tuple(answer.prompt))
        if len(expected.get(key, ())) < len(answer.token_ids):
            expected[key] = oracles[name].generate(answer.prompt, len(answer.token_ids), eos_token_id=None)
        oracles[name].check(answer.prompt, expected[key][: len(answer.token_ids)], answer.token_ids, name)
    later = [answer for answer in clients.answers if answer.sent_s > switched_s and len(answer.token_ids) == MAX_TOKENS]
    assert {names[answer.fingerprint] for answer in later} == {"new", "b"}, "new requests are the new one's"
    assert {names[answer.fingerprint] for answer in clients.answers} == {"old", "new", "b"}


async def _check_restart(service: Service, worker: WorkerProcess, oracles: dict[str, GreedyOracle]) -> None:
    """The scheduler is killed under requests of both models, and the worker of `b` is slow to be found again."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    begun: asyncio.Queue[str] = asyncio.Queue()

    async def read(client: AsyncClient, model: str, prompt: list[int]) -> list[int]:
        token_ids: list[int] = []
        async for output in client.generate(prompt_token_ids=prompt, sampling_params=params, model=model):
            if not token_ids:
                begun.put_nowait(model)
            token_ids += output.outputs[0].token_ids
        return token_ids

    async with AsyncClient(service.address) as client, grpc.aio.insecure_channel(service.address) as channel:
        wanted = [(model, prompt) for prompt in PROMPTS for model in ("a", "b")]
        streams = [asyncio.create_task(read(client, *each)) for each in wanted]
        for _ in wanted:
            await asyncio.wait_for(begun.get(), DEADLINE_S)
        worker.send_signal(signal.SIGSTOP)
        assert not all(stream.done() for stream in streams[1::2])
        await asyncio.to_thread(service.restart, "--worker-wait-timeout=60")
        clients = Clients([inference_pb2_grpc.InferenceStub(channel)])
        await until(lambda: _names(clients))
        with pytest.raises(grpc.aio.AioRpcError, match="not all workers have joined yet") as refused:
            await clients.ask(0, "b", PROMPTS[0])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        worker.send_signal(signal.SIGCONT)
        for (model, prompt), token_ids in zip(wanted, await asyncio.gather(*streams), strict=True):
            oracle = oracles["new" if model == "a" else "b"]
            oracle.check(prompt, oracle.generate(prompt, 150, eos_token_id=None), token_ids, model)


async def _names(clients: Clients) -> set[str]:
    with contextlib.suppress(grpc.aio.AioRpcError):
        return {state.name for state in (await clients.models()).values()}
    return set()


async def _has(clients: Clients, count: int) -> bool:
    return len(await clients.models()) == count


async def _runs(control: inference_pb2_grpc.ControlStub, worker: str, count: int) -> bool:
    states = (await control.ListWorkers(pb.ListWorkersRequest())).workers
    return any(state.num_running == count for state in states if state.address == worker)
