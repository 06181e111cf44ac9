"""`Control` over shards: a call has an end also where the link to a shard is closed in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
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
