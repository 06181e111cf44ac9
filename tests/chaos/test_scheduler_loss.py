"""The scheduler is killed under its clients: each goes on by itself where it stopped, at the one that comes next."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from octavo import AsyncClient, Client, SamplingParams
from octavo.errors import RequestFailed
from octavo.ports import free_port
from tests.tiny_models import make_tiny_llama

NUM_STREAMS = 16
MAX_TOKENS = 120
READY_WITHIN_S = 60.0


class Pool:
    """A worker, and a scheduler that can be killed and comes back at the same address."""

    def __init__(self, model: Path) -> None:
        port = free_port()
        worker = f"127.0.0.1:{port}"
        sizes = ["--kv-cache-memory=0.05", "--block-size=8", "--max-num-seqs=24", "--max-num-batched-tokens=128"]
        self._worker = _octavo("worker", f"--model={model}", f"--port={port}", *sizes)
        self.address = f"127.0.0.1:{free_port()}"
        self._flags = ("scheduler", f"--port={self.address.rpartition(':')[2]}", f"--worker={worker}")
        self._scheduler = _octavo(*self._flags)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        with Client(self.address) as client:
            while True:
                try:
                    client.model_info()
                    return
                except RequestFailed:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

    def replace_scheduler(self) -> None:
        self._scheduler.kill()
        self._scheduler.wait()
        self._scheduler = _octavo(*self._flags)

    def end(self) -> None:
        for process in (self._scheduler, self._worker):
            process.terminate()
        for process in (self._scheduler, self._worker):
            process.wait(20)


def _octavo(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "octavo", *arguments])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))
    try:
        pool.wait_until_ready()
        yield pool
    finally:
        pool.end()


@dataclass
class Read:
    """What a client read of one request, by index of the output."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[object]] = field(default_factory=dict)
    num_tokens: int | None = None  # of the usage


def _params(stream: int) -> SamplingParams:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": stream},
        {"temperature": 1.0, "seed": stream, "n": 3},
        {"temperature": 1.5, "seed": stream, "stop": ["é", "ab", "q", "\n\n"], "include_stop_str_in_output": True},
    )
    return SamplingParams(max_tokens=MAX_TOKENS - stream, ignore_eos=stream % 8 < 4, **kinds[stream % 4])


async def _read(client: AsyncClient, stream: int, arrived: asyncio.Queue[int]) -> Read:
    read = Read()
    prompt = "Zwölf Boxkämpfer jagen Viktor " * (1 + stream)
    async for output in client.generate(prompt, _params(stream), timeout=60):
        for one in output.outputs:
            read.text[one.index] = read.text.get(one.index, "") + one.text
            read.token_ids.setdefault(one.index, []).extend(one.token_ids)
            if one.finish_reason:
                read.ends.setdefault(one.index, []).append((one.finish_reason, one.stop_reason))
            arrived.put_nowait(len(one.token_ids))
        if output.finished:
            assert output.metrics is not None
            read.num_tokens = output.metrics.num_output_tokens
    return read


async def _run(pool: Pool, kill_after: list[int]) -> list[Read]:
    """All streams at once; the scheduler is killed whenever so many tokens have arrived in all."""
    arrived: asyncio.Queue[int] = asyncio.Queue()
    async with AsyncClient(pool.address) as client:
        streams = [asyncio.create_task(_read(client, stream, arrived)) for stream in range(NUM_STREAMS)]
        num_tokens = 0
        for at in kill_after:
            while num_tokens < at:
                num_tokens += await asyncio.wait_for(arrived.get(), 60)
            await asyncio.to_thread(pool.replace_scheduler)
        return await asyncio.gather(*streams)


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> list[Read]:
    return asyncio.run(_run(pool, []))


def _check(pool: Pool, undisturbed: list[Read], seed: int) -> None:
    total = sum(read.num_tokens or 0 for read in undisturbed)
    kill_after = sorted(random.Random(seed).sample(range(1, total * 3 // 4), 2))
    for read, expected in zip(asyncio.run(_run(pool, kill_after)), undisturbed, strict=True):
        assert read == expected


def test_every_stream_is_finished_by_the_next_scheduler(pool: Pool, undisturbed: list[Read]) -> None:
    assert all(read.ends for read in undisturbed)
    _check(pool, undisturbed, seed=0)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1, 20))
def test_every_stream_is_finished_by_the_next_scheduler_wherever_it_is_killed(
    pool: Pool, undisturbed: list[Read], seed: int
) -> None:
    _check(pool, undisturbed, seed)
