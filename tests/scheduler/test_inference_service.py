"""The service that answers clients, before a request has come to the core: what a deadline ends there."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import grpc

from octavo.rpc import bind
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.inference_service import TOKENIZER_THREADS, InferenceService, add_to_server
from scheduler_svc.mailboxes import Mailboxes


class SlowFrontend:
    """Tokenises until it is told to stop."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def prepare(self, request: pb.GenerateRequest, arrival_ns: int) -> Any:
        self.begun.append(request.request_id)
        assert self.may_end.wait(20)


class NoCore:
    """Has room, and takes nothing: whatever is submitted to it fails the test."""

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int) -> None:
        pass


async def test_a_deadline_ends_what_is_being_tokenised_and_what_waits_for_it() -> None:
    frontend = SlowFrontend()
    service = InferenceService(cast(Any, frontend), cast(Any, NoCore()), Mailboxes(asyncio.get_running_loop()))
    server = grpc.aio.server()
    add_to_server(service, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(request_id=str(number)), timeout=0.5)
            for number in range(TOKENIZER_THREADS + 3)
        ]
        for call in calls:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deadline = time.monotonic() + 10
    while not service.is_idle:
        assert time.monotonic() < deadline, "a call is kept"
        await asyncio.sleep(0.01)
    frontend.may_end.set()
    await server.stop(None)
    assert len(frontend.begun) == TOKENIZER_THREADS, "nothing is tokenised for those who are gone"
