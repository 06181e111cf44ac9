"""`Control` over shards: a call has an end also where the link to a shard is closed in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.api.request_guard import RequestGuard
from scheduler_svc.api.step_watch import MAX_WATCHERS
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.shards.live_ids import LiveIds
from scheduler_svc.shards.sharded_control import ShardedControl
from scheduler_svc.shards.shards import LiveShard, Shards


class SilentShard(inference_pb2_grpc.ControlServicer):
    """Answers nothing."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        self.is_asked.set()
        await asyncio.Event().wait()

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        await self.GetLoad(request, context)

    async def GetBlocks(self, request: Any, context: Any) -> Any:
        await self.GetLoad(request, context)


class OneShard:
    def __init__(self, live: LiveShard) -> None:
        self.live, self.came, self.addresses = {0: live}, list[Any](), list[str]()


Ask = Callable[[inference_pb2_grpc.ControlStub], Awaitable[Any]]
ASKED: dict[str, Ask] = {
    "GetLoad": lambda stub: stub.GetLoad(pb.GetLoadRequest()),
    "GetBlocks": lambda stub: stub.GetBlocks(pb.GetBlocksRequest()),
    "LoadAdapter": lambda stub: stub.LoadAdapter(pb.ControlLoadAdapterRequest(name="one", path="/one")),
}


@pytest.mark.parametrize("method", ASKED)
async def test_a_call_ends_when_the_link_to_a_shard_is_closed(tmp_path: Path, method: str) -> None:
    """gRPC cancels calls of a channel that is closed; a method that passes that on leaves its caller without an end."""
    silent, shard, parent = SilentShard(), grpc.aio.server(), grpc.aio.server()
    shard.add_insecure_port(f"unix:{tmp_path}/shard")
    inference_pb2_grpc.add_ControlServicer_to_server(silent, shard)
    link = grpc.aio.insecure_channel(f"unix:{tmp_path}/shard")
    shards = cast(Shards, OneShard(LiveShard(0, "", link)))
    control = ShardedControl(shards, LiveIds(), SchedulerConfig(), lambda: None)
    parent.add_insecure_port(f"unix:{tmp_path}/parent")
    inference_pb2_grpc.add_ControlServicer_to_server(control, parent)
    await shard.start()
    await parent.start()
    try:
        async with asyncio.timeout(10), grpc.aio.insecure_channel(f"unix:{tmp_path}/parent") as channel:
            asking = asyncio.ensure_future(ASKED[method](inference_pb2_grpc.ControlStub(channel)))
            await silent.is_asked.wait()
            await link.close()
            if method == "GetLoad":
                assert await asking == pb.Load(), "what a shard cannot be asked is left out"
                return
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asking
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await parent.stop(None)
        await shard.stop(None)


class TwoShards:
    """Two that are up, until a test takes one away."""

    def __init__(self, lives: list[LiveShard]) -> None:
        self.live, self.came, self.addresses = dict(enumerate(lives)), list[Any](), list[str]()


class TalkingShard(inference_pb2_grpc.ControlServicer):
    """`on_asked` is called before it answers."""

    def __init__(self) -> None:
        self.on_asked: Callable[[], object] = lambda: None
        self.refusal: grpc.StatusCode | None = None  # of those that watch

    async def GetBlocks(self, request: Any, context: Any) -> Any:
        self.on_asked()
        return pb.GetBlocksResponse()

    async def DumpFlightRecord(self, request: Any, context: Any) -> Any:
        yield pb.FlightRecordPiece(data=b"x")
        self.on_asked()

    async def WatchSteps(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            await context.abort(self.refusal, "why")
        while True:
            yield pb.StepSummary(worker="w")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def parent_of_two(
    tmp_path: Path,
) -> AsyncIterator[tuple[inference_pb2_grpc.ControlStub, TwoShards, list[TalkingShard]]]:
    talking, servers, lives = [TalkingShard(), TalkingShard()], list[grpc.aio.Server](), list[LiveShard]()
    for index, shard in enumerate(talking):
        servers.append(server := grpc.aio.server())
        server.add_insecure_port(address := f"unix:{tmp_path}/{index}")
        inference_pb2_grpc.add_ControlServicer_to_server(shard, server)
        lives.append(LiveShard(index, "", grpc.aio.insecure_channel(address)))
    servers.append(parent := grpc.aio.server(interceptors=(RequestGuard(),)))
    shards = TwoShards(lives)
    control = ShardedControl(cast(Shards, shards), LiveIds(), SchedulerConfig(), lambda: None)
    inference_pb2_grpc.add_ControlServicer_to_server(control, parent)
    parent.add_insecure_port(address := f"unix:{tmp_path}/parent")
    for server in servers:
        await server.start()
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            yield inference_pb2_grpc.ControlStub(channel), shards, talking
    finally:
        for server in reversed(servers):
            await server.stop(None)


async def test_a_shard_that_is_lost_while_another_one_answers_is_left_out(tmp_path: Path) -> None:
    async with parent_of_two(tmp_path) as (stub, shards, talking):
        both = dict(shards.live)
        talking[0].on_asked = lambda: shards.live.pop(1, None)
        assert await stub.GetBlocks(pb.GetBlocksRequest()) == pb.GetBlocksResponse()
        shards.live = both
        assert [piece.shard async for piece in stub.DumpFlightRecord(pb.DumpFlightRecordRequest())] == [0]


async def test_who_watches_all_shards_hears_where_one_refuses_and_goes_on_where_one_is_lost(tmp_path: Path) -> None:
    async with parent_of_two(tmp_path) as (stub, _, talking):
        talking[1].refusal = grpc.StatusCode.UNAVAILABLE
        call = stub.WatchSteps(pb.WatchStepsRequest())
        assert [(await call.read()).worker for _ in range(5)] == ["w"] * 5
        call.cancel()
        talking[1].refusal = grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.WatchSteps(pb.WatchStepsRequest()):
                pass
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED and raised.value.details() == "why"


async def test_as_many_watch_all_shards_as_may_watch_one(tmp_path: Path) -> None:
    async with parent_of_two(tmp_path) as (stub, *_):
        calls = [stub.WatchSteps(pb.WatchStepsRequest()) for _ in range(MAX_WATCHERS)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.WatchSteps(pb.WatchStepsRequest()).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        while True:  # until the parent has seen that
            call = stub.WatchSteps(pb.WatchStepsRequest())
            try:
                await call.read()
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
