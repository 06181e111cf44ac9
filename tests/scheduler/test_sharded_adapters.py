"""Adapters over several shards: one that comes later gets what the others have, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from protos import inference_pb2 as pb
from scheduler_svc.shards.sharded_adapters import ShardedAdapters
from scheduler_svc.shards.shards import LiveShard, Shards


class FakeShard:
    """A shard and its `Control`: loading and unloading take until they are let go on."""

    def __init__(self, index: int) -> None:
        self.index, self.control = index, self
        self.loaded: list[str] = []
        self.may_load = asyncio.Event()
        self.may_unload = asyncio.Event()
        self.may_unload.set()
        self.num_asked = 0
        self.cannot_load: set[str] = set()  # names

    async def LoadAdapter(self, request: pb.ControlLoadAdapterRequest) -> pb.ControlLoadAdapterResponse:
        self.num_asked += 1
        await self.may_load.wait()
        if request.name in self.cannot_load:
            raise grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), grpc.aio.Metadata())
        self.loaded.append(request.name)
        return pb.ControlLoadAdapterResponse(generation=1)

    async def UnloadAdapter(self, request: pb.ControlUnloadAdapterRequest) -> pb.ControlUnloadAdapterResponse:
        await self.may_unload.wait()
        if request.name in self.loaded:
            self.loaded.remove(request.name)
        return pb.ControlUnloadAdapterResponse()


class FakeShards:
    def __init__(self) -> None:
        self.live: dict[int, Any] = {}
        self.came: list[Any] = []

    def begin(self, shard: FakeShard) -> None:
        self.live[shard.index] = shard
        for listener in self.came:
            listener(cast(LiveShard, shard))


async def test_what_is_unloaded_while_a_shard_that_came_late_loads_it_is_not_left_there() -> None:
    shards = FakeShards()
    adapters = ShardedAdapters(cast(Shards, shards))
    first, late = FakeShard(0), FakeShard(1)
    first.may_load.set()
    shards.begin(first)
    for name in ("gone", "stays"):
        await adapters.load(pb.ControlLoadAdapterRequest(name=name, path=f"/{name}"))
    shards.begin(late)
    async with asyncio.timeout(20):
        while not late.num_asked:
            await asyncio.sleep(0)
        await adapters.unload(pb.ControlUnloadAdapterRequest(name="gone"))
        late.may_load.set()
        while adapters._catching_up:
            await asyncio.sleep(0)
    assert first.loaded == late.loaded == ["stays"]


async def test_a_shard_that_comes_while_the_others_load_an_adapter_gets_it_too() -> None:
    """It came with nothing to be given, and was not there to be asked."""
    shards = FakeShards()
    adapters = ShardedAdapters(cast(Shards, shards))
    first, late = FakeShard(0), FakeShard(1)
    late.may_load.set()
    shards.begin(first)
    async with asyncio.timeout(20):
        loading = asyncio.create_task(adapters.load(pb.ControlLoadAdapterRequest(name="one", path="/one")))
        while not first.num_asked:
            await asyncio.sleep(0)
        shards.begin(late)
        while adapters._catching_up:
            await asyncio.sleep(0)
        first.may_load.set()
        await loading
        while adapters._catching_up:
            await asyncio.sleep(0)
    assert first.loaded == late.loaded == ["one"]


async def test_a_shard_that_comes_while_the_others_unload_an_adapter_does_not_keep_it() -> None:
    shards = FakeShards()
    adapters = ShardedAdapters(cast(Shards, shards))
    first, late = FakeShard(0), FakeShard(1)
    for shard in (first, late):
        shard.may_load.set()
    shards.begin(first)
    async with asyncio.timeout(20):
        await adapters.load(pb.ControlLoadAdapterRequest(name="one", path="/one"))
        first.may_unload.clear()
        unloading = asyncio.create_task(adapters.unload(pb.ControlUnloadAdapterRequest(name="one")))
        await asyncio.sleep(0)
        shards.begin(late)
        while adapters._catching_up:
            await asyncio.sleep(0)
        assert late.loaded == ["one"], "nobody has said yet that it is gone"
        first.may_unload.set()
        await unloading
        while adapters._catching_up:
            await asyncio.sleep(0)
    assert first.loaded == late.loaded == []


async def test_what_a_shard_that_came_late_cannot_load_keeps_nothing_else_from_it() -> None:
    shards = FakeShards()
    adapters = ShardedAdapters(cast(Shards, shards))
    first, late = FakeShard(0), FakeShard(1)
    late.cannot_load = {"bad"}
    for shard in (first, late):
        shard.may_load.set()
    shards.begin(first)
    async with asyncio.timeout(20):
        for name in ("bad", "good", "fine"):
            await adapters.load(pb.ControlLoadAdapterRequest(name=name, path=f"/{name}"))
        shards.begin(late)
        while late.num_asked < 3:
            await asyncio.sleep(0)
        assert set(late.loaded) == {"good", "fine"}
        late.cannot_load.clear()
        while adapters._catching_up:
            await asyncio.sleep(0.01)
    assert sorted(late.loaded) == ["bad", "fine", "good"], "each once"
