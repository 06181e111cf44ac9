"""Adapters by the calls of the protocol, over a real gRPC server: what is refused and when, and steps beside them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import worker_pb2, worker_pb2_grpc
from tests.adapters import make_adapter
from tests.tiny_models import make_tiny_llama
from tests.worker.fake_model import prefill, slots_u16, tokens_of
from tests.worker.test_lease import Stream
from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.config import WorkerConfig
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model
from worker_svc.models.parts import ModelPart
from worker_svc.parallel.ranks import OnlyRank
from worker_svc.server import WorkerServer
from worker_svc.service import adapter_reads
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

CONFIG = WorkerConfig(
    port=0,
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory=0.001,
    swap_space=0,
    enable_lora=True,
)
PROMPT = [5, 7, 11]


@dataclass
class Setup:
    """A served model that takes one adapter in a step and two in all, and the folder of one."""

    stub: Any
    settings_id: str
    folder: str

    async def open(self) -> Stream:
        stream = Stream(self.stub.Execute())
        await stream.send(open=worker_pb2.OpenLease(settings_id=self.settings_id))
        stream.epoch = (await stream.wait_for("notice")).lease.epoch
        return stream

    async def close(self, stream: Stream) -> None:
        """Returns when the lease is free."""
        await stream.call.done_writing()
        with pytest.raises(EOFError):
            await stream.wait_for("result")
        async with asyncio.timeout(10):
            while (
                await self.stub.GetInfo(worker_pb2.GetInfoRequest())
            ).lifecycle == worker_pb2.WORKER_LIFECYCLE_LEASED:
                await asyncio.sleep(0.01)

    async def load(self, name: str, epoch: int, generation: int = 1, folder: str = "") -> None:
        request = worker_pb2.LoadAdapterRequest(
            name=name, path=folder or self.folder, generation=generation, epoch=epoch
        )
        await self.stub.LoadAdapter(request)

    async def unload(self, name: str, epoch: int) -> None:
        await self.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name=name, epoch=epoch))

    async def loaded(self) -> dict[str, int]:
        info = await self.stub.GetInfo(worker_pb2.GetInfoRequest())
        return {adapter.name: adapter.generation for adapter in info.adapters}


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with served(tmp_path, max_loaded=2) as it:
        yield it


@asynccontextmanager
async def served(tmp_path: Path, max_loaded: int) -> AsyncIterator[Setup]:
    folder = make_tiny_llama(tmp_path / "tiny", num_layers=1)
    config = ModelConfig.from_folder(folder)
    part = ModelPart.of(config, OnlyRank())
    model = load_model(folder, part, "cpu")
    assert isinstance(model, Decoder)
    adapters = AdapterSet(model, part, max_loras=1, max_rank=16, max_loaded=max_loaded)
    of_worker = replace(CONFIG, max_cpu_loras=max_loaded)
    worker = Worker(ModelRunner(model, part.own, CONFIG.block_size, adapters=adapters), of_worker)
    server = WorkerServer(worker, config, TokenizerFiles({"tokenizer.json": b"{}"}))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        sizes = await stub.Initialize(worker_pb2.InitializeRequest(max_model_len=64))
        adapter = make_adapter(tmp_path / "adapter", folder)
        yield Setup(stub, sizes.settings_id, str(adapter))
    await server.stop()


async def refusal(call: Any) -> str:
    """Why a call was refused, in one line."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION, error.value
    details = error.value.details()
    assert details and "\n" not in details
    return details


def step_of(step_id: int, *adapters: str, released: int = 0) -> worker_pb2.Step:
    """The same prompt in a slot for each of the adapters, after so many slots were released."""
    step = prefill(step_id, [PROMPT] * len(adapters))
    for group, adapter in zip(step.groups, adapters, strict=True):
        group.adapter = adapter
    step.released_slots_u16 = slots_u16(range(released))
    return step


async def test_only_the_lease_that_holds_the_worker_loads_and_unloads(setup: Setup) -> None:
    assert "epoch 0 is not that of the lease, there is none" in await refusal(setup.load("a", 0))
    stream = await setup.open()
    wrong = stream.epoch + 1
    assert f"epoch {wrong} is not that of the lease, {stream.epoch}" in await refusal(setup.load("a", wrong))
    await setup.load("a", stream.epoch, generation=7)
    notice = await stream.wait_for("notice")
    assert (notice.adapter_loaded.name, notice.adapter_loaded.generation) == ("a", 7)
    assert f"epoch {wrong} is not" in await refusal(setup.unload("a", wrong))
    assert await setup.loaded() == {"a": 7}
    await setup.close(stream)
    again = await setup.open()
    assert await setup.loaded() == {}
    assert f"epoch {stream.epoch} is not" in await refusal(setup.load("a", stream.epoch))
    await setup.load("a", again.epoch, generation=1)
    assert await setup.loaded() == {"a": 1}


async def test_a_lease_finds_no_blocks_that_were_computed_with_adapters_of_an_earlier_one(setup: Setup) -> None:
    """Its scheduler may be the same, and the adapter's folder have been written anew meanwhile."""
    stream = await setup.open()
    await setup.load("a", stream.epoch)
    await stream.run(step_of(1, "a", ""))
    promises = prefill(2, [])
    tables = [group.sequences[0].block_table[0] for group in step_of(1, "a", "").groups]
    promises.cached_blocks.block_ids_u32 = np.array(tables, "<u4").tobytes()
    promises.cached_blocks.hashes = b"A" * 32 + b"B" * 32
    await stream.run(promises)
    await setup.close(stream)
    again = Stream(setup.stub.Execute())
    await again.send(open=worker_pb2.OpenLease(settings_id=setup.settings_id))
    assert (await again.wait_for("notice")).lease.cached_blocks.hashes == b"B" * 32


async def test_what_cannot_be_loaded_changes_nothing(setup: Setup) -> None:
    stream = await setup.open()
    assert "adapter folder /nowhere does not exist" in await refusal(setup.load("a", stream.epoch, folder="/nowhere"))
    for name in ("a", "b", "a"):
        await setup.load(name, stream.epoch)
    assert "'c': 2 adapters are loaded, as many as --max-cpu-loras" in await refusal(setup.load("c", stream.epoch))
    assert "loaded as generation 1; unload it first" in await refusal(setup.load("a", stream.epoch, generation=2))
    assert "adapter 'c' is not loaded; loaded: a, b" in await refusal(setup.unload("c", stream.epoch))
    assert await setup.loaded() == {"a": 1, "b": 1}


async def test_a_worker_is_asked_for_all_that_it_may_have_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a scheduler that it joins, which does not ask again for one that was refused."""
    read = AdapterSet.read

    def read_slowly(adapters: AdapterSet, path: str) -> Adapter:
        time.sleep(0.01)  # so that all are here before the first ones are read
        return read(adapters, path)

    monkeypatch.setattr(AdapterSet, "read", read_slowly)
    async with served(tmp_path, max_loaded=80) as setup:
        stream = await setup.open()
        names = [f"a{number}" for number in range(80)]
        await asyncio.gather(*(setup.load(name, stream.epoch) for name in names))
        assert await setup.loaded() == dict.fromkeys(names, 1)


async def test_adapters_that_no_disk_gives_keep_others_waiting_for_a_while_only(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their callers wait on or have given up; and there are only so many."""
    monkeypatch.setattr(adapter_reads, "SLOW_S", 0.2)
    read, disk_answers, folder = AdapterSet.read, threading.Event(), setup.folder

    def read_or_hang(adapters: AdapterSet, path: str) -> Adapter:
        if path != folder:
            disk_answers.wait()
        return read(adapters, folder)

    monkeypatch.setattr(AdapterSet, "read", read_or_hang)
    stream = await setup.open()
    hung = [asyncio.create_task(setup.load(f"h{n}", stream.epoch, folder=f"/of/another/{n}")) for n in range(8)]
    await asyncio.sleep(0.1)
    for task in hung[:4]:
        task.cancel()
    async with asyncio.timeout(10):
        await setup.load("healthy", stream.epoch)
    assert await setup.loaded() == {"healthy": 1}
    reads = adapter_reads.AdapterReads(most=1)

    def read_one() -> Adapter:
        disk_answers.wait()
        return Adapter("", {}, b"")

    waiting = asyncio.create_task(reads.read(read_one))
    await asyncio.sleep(0.01)
    with pytest.raises(AdapterError, match="1 adapters are being read already"):
        await reads.read(read_one)
    disk_answers.set()
    assert (await waiting).parts == {}
    await asyncio.gather(*hung, return_exceptions=True)


async def test_a_read_that_fails_when_its_caller_has_given_up_is_no_error_of_the_event_loop() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    disk_answers, reads = threading.Event(), adapter_reads.AdapterReads(most=1)

    def fail() -> Adapter:
        disk_answers.wait()
        raise AdapterError("no adapter")

    reading = asyncio.create_task(reads.read(fail))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    (future,) = reads._reads
    disk_answers.set()
    with pytest.raises(AdapterError):
        await asyncio.wrap_future(future)
    await asyncio.sleep(0)  # what waited for it before is told
    del future, reading
    reads._reads.clear()
    gc.collect()
    assert not told


async def test_a_path_that_is_none_has_its_reason(setup: Setup) -> None:
    stream = await setup.open()
    for path in ("/" + "a" * 300, "/" + "b/" * 30_000, "~nobody-of-this-name/a"):
        assert "cannot read" in await refusal(setup.load("a", stream.epoch, folder=path))


async def test_an_adapter_is_not_unloaded_under_a_sequence(setup: Setup) -> None:
    stream = await setup.open()
    await setup.load("a", stream.epoch)
    with_a, without = tokens_of(await stream.run(step_of(1, "a", "")))
    assert with_a != without, "the adapter does something"
    assert await refusal(setup.unload("a", stream.epoch)) == "adapter 'a' is used by 1 sequences"
    assert tokens_of(await stream.run(step_of(2, "", "a", released=2))) == [without, with_a]
    await stream.run(step_of(3, "", released=2))
    await setup.unload("a", stream.epoch)
    assert await setup.loaded() == {}


async def test_a_step_with_too_many_adapters_fails_and_the_next_one_is_run(setup: Setup) -> None:
    stream = await setup.open()
    for name in ("a", "b"):
        await setup.load(name, stream.epoch)
    await stream.send(step=step_of(1, "a", "b"))
    failed = await stream.wait_for("result")
    assert "step with 2 adapters, more than 1" in str(failed)
    following = step_of(2, "b", "", released=2)
    following.resume_after = 1
    with_b, without = tokens_of(await stream.run(following))
    assert with_b != without
