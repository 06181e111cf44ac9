"""Calls that pass through another server: what either side sees is what it would see without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from octavo.shared import rpc
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.frontends import forwarding
from scheduler_svc.frontends.forwarding import forward


class Origin(inference_pb2_grpc.ControlServicer):
    def __init__(self) -> None:
        self.metadata: dict[str, str | bytes] = {}
        self.time_remaining = 0.0
        self.was_left = asyncio.Event()
        self.hangs = False
        self.num_probes = 0

    async def GetServerInfo(self, request, context):
        self.num_probes += 1
        if self.hangs:
            await asyncio.Event().wait()
        return pb.ServerInfo()

    async def GetLoad(self, request, context):
        while self.num_probes < 3:
            await asyncio.sleep(0.001)
        if self.hangs:
            await asyncio.Event().wait()
        return pb.Load(num_requests_running=1)

    async def GetRequest(self, request, context):
        self.metadata, self.time_remaining = dict(context.invocation_metadata()), context.time_remaining()
        if request.request_id == "absent":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such", trailing_metadata=(("why-bin", b"\0\1"),))
        return pb.RequestState(request_id=request.request_id)

    async def WatchSteps(self, request, context):
        try:
            for number in range(3):
                yield pb.StepSummary(step_id=number)
            if request.worker == "ends":
                return
            if request.worker == "fails":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            await asyncio.Event().wait()
        finally:
            self.was_left.set()


@asynccontextmanager
async def serving(add) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    add(server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
        yield channel
    await server.stop(None)


@asynccontextmanager
async def forwarded(origin: Origin) -> AsyncIterator[inference_pb2_grpc.ControlStub]:
    service = pb.DESCRIPTOR.services_by_name["Control"]
    async with serving(lambda server: inference_pb2_grpc.add_ControlServicer_to_server(origin, server)) as behind:
        async with serving(lambda server: forward(service, behind, server, probe="GetServerInfo")) as channel:
            yield inference_pb2_grpc.ControlStub(channel)


async def test_an_answer_with_metadata_and_deadline():
    origin = Origin()
    async with forwarded(origin) as stub:
        metadata = (("authorization", "Bearer key"), ("trace-bin", b"\0"))
        answer = await stub.GetRequest(pb.GetRequestRequest(request_id="x"), metadata=metadata, timeout=50)
        assert answer.request_id == "x"
    assert origin.metadata["authorization"] == "Bearer key" and origin.metadata["trace-bin"] == b"\0"
    # Each of the two hops writes a deadline of this length in tenths of a second, rounded up; a call that was
    # passed on without one has some 10^9 seconds.
    assert 0 < origin.time_remaining < 51


async def test_a_status_with_its_details():
    async with forwarded(Origin()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetRequest(pb.GetRequestRequest(request_id="absent"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND and raised.value.details() == "no such"
    assert dict(raised.value.trailing_metadata())["why-bin"] == b"\0\1"


async def test_a_stream_to_its_end():
    async with forwarded(Origin()) as stub:
        steps = [step.step_id async for step in stub.WatchSteps(pb.WatchStepsRequest(worker="ends"))]
    assert steps == [0, 1, 2]


async def test_a_stream_that_fails_after_what_it_said():
    steps = []
    async with forwarded(Origin()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for step in stub.WatchSteps(pb.WatchStepsRequest(worker="fails")):
                steps.append(step.step_id)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE and steps == [0, 1, 2]


async def test_a_reader_that_leaves_is_gone_at_the_origin_too():
    origin = Origin()
    async with forwarded(origin) as stub:
        call = stub.WatchSteps(pb.WatchStepsRequest())
        assert (await call.read()).step_id == 0
        call.cancel()
        await asyncio.wait_for(origin.was_left.wait(), 10)


async def test_what_the_origin_does_not_implement():
    async with forwarded(Origin()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Drain(pb.DrainRequest())
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_without_a_deadline_may_take_as_long_as_the_origin_answers_others(monkeypatch):
    monkeypatch.setattr(forwarding, "PROBE_INTERVAL_S", 0.01)
    origin = Origin()
    async with forwarded(origin) as stub:
        assert (await stub.GetLoad(pb.GetLoadRequest())).num_requests_running == 1
    assert origin.num_probes >= 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_without_a_deadline_ends_when_the_origin_answers_nothing_any_more(monkeypatch, is_stream):
    monkeypatch.setattr(forwarding, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(forwarding, "PROBE_TIMEOUT_S", 0.2)
    origin = Origin()
    origin.hangs = True
    async with forwarded(origin) as stub, asyncio.timeout(20):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            if is_stream:
                async for _ in stub.WatchSteps(pb.WatchStepsRequest()):
                    pass
            else:
                await stub.GetLoad(pb.GetLoadRequest())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE and "answered nothing" in raised.value.details()
