"""Schedulers are killed or stopped under their clients: each request goes on by itself, at the next one or another.

32 requests of every kind at once, over two workers: one scheduler that comes back, two that share the workers, and one
that stands by. Every token is that of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

import pytest

from octavo import AsyncClient, Client, SamplingParams
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy, Waiting
from octavo.shared.ports import free_port
from tests.chaos.worker_process import WorkerProcess
from tests.forkserver import WITHOUT_TORCH, ForkedCommand
from tests.gateway.running import gateway
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

NUM_STREAMS = 32
MAX_TOKENS = 52
NUM_CACHED = 1_024  # tokens: whole blocks
READY_WITHIN_S = 60.0
TIMEOUT_S = 120.0
STOPPED_S = 60.0  # for all of a run in which a scheduler is stopped, which is found after 15 s; gRPC's own are 70 s
SIZES = ("--kv-cache-memory=0.05", "--block-size=8", "--max-num-seqs=24", "--max-num-batched-tokens=128")
ONCE = RetryPolicy(window_s=0.0)


class Scheduler:
    """At an address of its own; may be killed and come back there."""

    def __init__(self, workers: list[str], *options: str) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._arguments = ("scheduler", f"--port={port}", *(f"--worker={address}" for address in workers), *options)
        self._process = ForkedCommand(self._arguments, missing=WITHOUT_TORCH)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """It is there, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def come_back(self) -> None:
        self._process = ForkedCommand(self._arguments, missing=WITHOUT_TORCH)

    def is_serving(self) -> bool:
        with Client(self.address, retry=ONCE) as client:
            try:
                client.model_info()
            except RequestFailed:
                return False
            return True

    def num_workers(self) -> int:
        from protos import inference_pb2

        with Client(self.address, retry=ONCE) as client:
            try:
                workers = client._servers.current.control.ListWorkers(inference_pb2.ListWorkersRequest(), timeout=5)
            except Exception:
                return -1
        serving = inference_pb2.WORKER_HEALTH_SERVING
        return sum(worker.health == serving for worker in workers.workers)

    def wait_for_workers(self, count: int) -> None:
        wait_until(lambda: self.num_workers() == count, f"{count} workers at {self.address}", READY_WITHIN_S)

    def end(self) -> None:
        self.go_on()
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    logs = tmp_path_factory.mktemp("logs")
    arguments = [f"--model={model}", "--num-threads=1", *SIZES]
    processes = [WorkerProcess(arguments, logs / f"worker-{number}.log") for number in range(2)]
    try:
        for process in processes:
            process.wait_until_ready()
        yield [f"127.0.0.1:{process.port}" for process in processes]
    finally:
        for process in processes:
            process.end()


@pytest.fixture
def start(workers: list[str]) -> Iterator[Callable[..., Scheduler]]:
    started: list[Scheduler] = []

    def start(*options: str) -> Scheduler:
        started.append(Scheduler(workers, *options))
        return started[-1]

    yield start
    for scheduler in started:
        scheduler.end()


@pytest.fixture(scope="module")
def undisturbed(workers: list[str]) -> list[Read]:
    scheduler = Scheduler(workers)
    try:
        scheduler.wait_for_workers(2)
        return asyncio.run(_run(scheduler.address))
    finally:
        scheduler.end()


@dataclass
class Read:
    """What a client read of one request, by index of the output."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[object]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    num_tokens: int | None = None  # of the usage


def _request(stream: int) -> tuple[SamplingParams, dict[str, Any]]:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": stream},
        {"temperature": 1.0, "seed": stream, "n": 3},
        {"temperature": 1.5, "seed": stream, "stop": ["é", "ab", "q", "\n\n"], "include_stop_str_in_output": True},
        {"temperature": 0.0, "use_beam_search": True, "n": 2, "best_of": 3},
        {"temperature": 1.0, "n": 2, "best_of": 3, "seed": stream},
        {"temperature": 0.8, "seed": stream, "logprobs": 2},
        {"temperature": 1.1},  # the client draws its seed, and keeps it
    )
    kind = dict(kinds[stream % len(kinds)])
    if stream % 8 == 7:
        kind["seed"] = 1000 + stream  # or no two runs would be equal
    params = SamplingParams(max_tokens=MAX_TOKENS - stream, ignore_eos=stream % 8 < 4, **kind)
    return params, {"stream": False} if stream % 8 == 7 or stream % 16 == 9 else {}


async def _read(client: AsyncClient, stream: int, arrived: asyncio.Queue[int]) -> Read:
    read, (params, options) = Read(), _request(stream)
    prompt = "Zwölf Boxkämpfer jagen Viktor " * (1 + stream % 16)
    async for output in client.generate(prompt, params, timeout=TIMEOUT_S, request_id=f"r{stream}", **options):
        for one in output.outputs:
            read.text[one.index] = read.text.get(one.index, "") + one.text
            read.token_ids.setdefault(one.index, []).extend(one.token_ids)
            drawn = (next(iter(entry.values())) for entry in one.logprobs or ())
            read.logprobs.setdefault(one.index, []).extend(each.logprob for each in drawn)
            if one.finish_reason:
                read.ends.setdefault(one.index, []).append((one.finish_reason, one.stop_reason))
            arrived.put_nowait(len(one.token_ids))
        if output.finished:
            assert output.metrics is not None
            read.num_tokens = output.metrics.num_output_tokens
    return read


async def _run(
    address: str | list[str],
    disturb: Callable[[], None] | None = None,
    after: int = 0,
    waits: list[Waiting] | None = None,
) -> list[Read]:
    """All streams at once; `disturb` is called on a thread once so many tokens have arrived in all. `waits` gets the
    pauses of those that were interrupted."""
    arrived: asyncio.Queue[int] = asyncio.Queue()
    told: list[Waiting] = [] if waits is None else waits
    async with AsyncClient(address, retry=RetryPolicy(on_wait=told.append)) as client:
        streams = [asyncio.create_task(_read(client, stream, arrived)) for stream in range(NUM_STREAMS)]
        if disturb is not None:
            num_tokens = 0
            while num_tokens < after:
                num_tokens += await asyncio.wait_for(arrived.get(), TIMEOUT_S)
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*streams)


def _check_interrupted(
    address: str | list[str], disturb: Callable[[], None], undisturbed: list[Read], seed: int
) -> None:
    """Some are under way when it happens, and all end as if it had not."""
    waits: list[Waiting] = []
    _check(asyncio.run(_run(address, disturb, _moment(undisturbed, seed), waits)), undisturbed)
    print(f"{len({each.request_id for each in waits})} of {NUM_STREAMS} were interrupted")
    assert waits, "nobody was interrupted"


def _check(reads: list[Read], undisturbed: list[Read]) -> None:
    for stream, (read, expected) in enumerate(zip(reads, undisturbed, strict=True)):
        # Logprobs, too, bit for bit: on a CPU a row's logits depend on nothing in its batch.
        assert read == expected, f"request {stream} differs from the undisturbed run"


def _moment(undisturbed: list[Read], seed: int) -> int:
    """Tokens after which something happens: while all kinds are under way, most times."""
    total = sum(read.num_tokens or 0 for read in undisturbed)
    return random.Random(seed).randrange(1, total // 2)


def _cached_tokens(address: str, prompt: list[int]) -> int:
    with Client(address) as client:
        output = client.complete(prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=1))
    assert output.metrics is not None
    return output.metrics.num_cached_tokens


_NUMBERS = itertools.count(40)


def _check_comes_back(scheduler: Scheduler, undisturbed: list[Read], seed: int, pause_s: float) -> None:
    scheduler.wait_for_workers(2)
    # Each worker gets some of them; so long that their blocks decide where they go, and not the pace of a moment.
    prompts = [[next(_NUMBERS), *itertools.islice(itertools.cycle(range(40, 72)), NUM_CACHED)] for _ in range(8)]
    assert [_cached_tokens(scheduler.address, prompt) for prompt in prompts] == [0] * 8

    def restart() -> None:
        scheduler.kill()
        time.sleep(pause_s)
        scheduler.come_back()

    _check_interrupted(scheduler.address, restart, undisturbed, seed)
    scheduler.wait_for_workers(2)
    cached = [_cached_tokens(scheduler.address, prompt) for prompt in prompts]
    assert sum(count == NUM_CACHED for count in cached) >= 4, f"the workers' caches came along: {cached}"


def test_every_request_is_finished_by_a_scheduler_that_comes_back(
    start: Callable[..., Scheduler], undisturbed: list[Read]
) -> None:
    assert all(read.ends for read in undisturbed)
    _check_comes_back(start(), undisturbed, seed=0, pause_s=0.5)


def _check_one_of_two(start: Callable[..., Scheduler], undisturbed: list[Read], seed: int) -> None:
    """Each holds one worker; the other takes over what the dead one had, and gives it back when that is there again."""
    options = ("--worker-quota=1", "--takeover-after=1")
    one, other = start(*options), start(*options)
    one.wait_for_workers(1)
    other.wait_for_workers(1)
    _check_interrupted([one.address, other.address], one.kill, undisturbed, seed)
    other.wait_for_workers(2)
    one.come_back()
    one.wait_for_workers(1)
    other.wait_for_workers(1)


def test_every_request_is_finished_by_the_other_of_two(
    start: Callable[..., Scheduler], undisturbed: list[Read]
) -> None:
    _check_one_of_two(start, undisturbed, seed=1)


def test_every_request_is_finished_by_the_other_where_one_is_stopped(
    start: Callable[..., Scheduler], undisturbed: list[Read]
) -> None:
    """Also those of a gateway. Its connections are open, and only pings find that nobody is there."""
    options = ("--worker-quota=1", "--takeover-after=1")
    one, other = start(*options), start(*options)
    one.wait_for_workers(1)
    other.wait_for_workers(1)
    asked = {"prompt": "Zwölf", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with gateway(f"{one.address},{other.address}", RetryPolicy(window_s=TIMEOUT_S)) as http, ExitStack() as stack:
        answers: list[HTTPResponse] = []
        events: list[bytes] = []

        def stop() -> None:
            answers.append(stack.enter_context(http.streaming("/v1/completions", asked)))
            events.append(answers[0].readline())
            one.stop()

        began_s = time.monotonic()
        _check(asyncio.run(_run([one.address, other.address], stop, _moment(undisturbed, 10))), undisturbed)
        events += answers[0].readlines()
        assert time.monotonic() - began_s < STOPPED_S
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith(b"data: {")]
        assert "".join(texts) == http.post("/v1/completions", asked)[1]["choices"][0]["text"]
    other.wait_for_workers(2)
    one.go_on()
    one.wait_for_workers(1)
    other.wait_for_workers(1)


def _check_standby(start: Callable[..., Scheduler], undisturbed: list[Read], seed: int) -> None:
    active = start("--worker-quota=2")
    active.wait_for_workers(2)
    standby = start("--worker-quota=0", "--takeover-after=0.5")
    addresses = [active.address, standby.address]
    _check_interrupted(addresses, active.kill, undisturbed, seed)
    standby.wait_for_workers(2)
    assert standby.is_serving()
    # The one it stood by for is there again, and wants its workers amid the work: nothing is lost by giving them back.
    _check(
        asyncio.run(_run([standby.address, active.address], active.come_back, _moment(undisturbed, seed))), undisturbed
    )
    active.wait_for_workers(2)
    wait_until(lambda: not standby.is_serving(), "a scheduler that stands by again", READY_WITHIN_S)
    active.kill()
    standby.wait_for_workers(2)


def test_every_request_is_finished_by_one_that_stood_by(
    start: Callable[..., Scheduler], undisturbed: list[Read]
) -> None:
    _check_standby(start, undisturbed, seed=2)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3, 8))
def test_schedulers_are_killed_at_any_moment(
    start: Callable[..., Scheduler], undisturbed: list[Read], seed: int
) -> None:
    if seed % 2:
        _check_one_of_two(start, undisturbed, seed)
    else:
        _check_standby(start, undisturbed, seed)


@pytest.mark.chaos
def test_a_pause_of_ten_seconds_is_waited_out(start: Callable[..., Scheduler], undisturbed: list[Read]) -> None:
    _check_comes_back(start(), undisturbed, seed=9, pause_s=10.0)
