"""A frontend process, in this one: it lets clients in when it knows what the others know."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from octavo.shared.ports import free_port
from protos import frontend_pb2, frontend_pb2_grpc, inference_pb2_grpc, shards_pb2, shards_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontend_process import serve
from scheduler_svc.models.model_description import encode_models
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.shards.front_service import FrontService
from tests.scheduler.tiny_served_model import tiny_served_model

DEADLINE_S = 20.0


class HeldCore(frontend_pb2_grpc.CoreServicer):
    """A core, or a shard, whose worker has joined since the frontend connected: it says so when `may_tell`.

    Attributes:
        is_asked: whether the frontend wants to hear all that there is.
        is_listening: whether it has said that clients can connect.
    """

    def __init__(self, models: frontend_pb2.ServedModels) -> None:
        self.is_asked, self.may_tell, self.is_listening = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end = asyncio.Event()
        self._models = models

    async def Connect(
        self, request_iterator: AsyncIterator[frontend_pb2.FrontendMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[frontend_pb2.CoreMessage]:
        yield frontend_pb2.CoreMessage(events=[frontend_pb2.CoreEvent(state=frontend_pb2.CoreState())])
        reading = asyncio.create_task(self._read(request_iterator))
        await self.is_asked.wait()
        await self.may_tell.wait()
        state = frontend_pb2.CoreState(models=self._models, is_ready=True)
        yield frontend_pb2.CoreMessage(events=[frontend_pb2.CoreEvent(state=state), frontend_pb2.CoreEvent(echo=True)])
        await self.may_end.wait()
        reading.cancel()

    async def _read(self, messages: AsyncIterator[frontend_pb2.FrontendMessage]) -> None:
        async for message in messages:
            for event in message.events:
                kind = event.WhichOneof("kind")
                assert kind in ("echo", "listening")
                (self.is_asked if kind == "echo" else self.is_listening).set()


@asynccontextmanager
async def served(core: HeldCore, folder: Path) -> AsyncIterator[tuple[str, FrontService]]:
    """The address of a core, or of a parent that has it as its only shard."""
    parent, server, address = FrontService(), grpc.aio.server(), f"unix:{folder}/core"
    parent.set_state(shards_pb2.FrontState(shards=[shards_pb2.ShardAddress(index=0, socket=address)]))
    frontend_pb2_grpc.add_CoreServicer_to_server(core, server)
    shards_pb2_grpc.add_FrontServicer_to_server(parent, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address, parent
    finally:
        await server.stop(None)


def options(port: int, num_shards: int = 1) -> SchedulerConfig:
    return SchedulerConfig(worker=("127.0.0.1:9",), port=port, text_processes=1, shards=num_shards)


@pytest.mark.parametrize("num_shards", [1, 2])
async def test_it_listens_when_it_knows_the_models_of_those_that_have_joined(tmp_path: Path, num_shards: int) -> None:
    model, port = tiny_served_model(tmp_path), free_port()
    core = HeldCore(encode_models(ServedModels.of(model), lambda _: tmp_path))
    async with served(core, tmp_path) as (address, parent), asyncio.timeout(DEADLINE_S):
        frontend = asyncio.create_task(serve(address, options(port, num_shards)))
        await core.is_asked.wait()
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))
        core.may_tell.set()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.TokenizeRequest(prompt="abc")
            answer = await inference_pb2_grpc.InferenceStub(channel).Tokenize(request, wait_for_ready=True)
        assert list(answer.token_ids) == model.tokenizer.encode("abc")
        core.may_end.set()
        parent.close()
        await frontend
        assert core.is_listening.is_set() == (num_shards == 1), "its parent is told, where there is one"


async def test_it_ends_with_a_core_that_goes_before_it_listens(tmp_path: Path) -> None:
    core = HeldCore(frontend_pb2.ServedModels())
    async with served(core, tmp_path) as (address, _):
        frontend = asyncio.create_task(serve(address, options(free_port())))
        await core.is_asked.wait()
    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(frontend, DEADLINE_S)
