"""Health, reflection, channelz and binding, asked over real sockets, by grpcurl where a plain client matters."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from octavo.calls.addresses import Servers
from octavo.shared import ports, rpc
from protos import inference_pb2, inference_pb2_grpc
from tests.grpcurl import grpcurl

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL = inference_pb2.DESCRIPTOR.services_by_name["Control"].full_name


@dataclass
class Running:
    server: grpc.aio.Server
    health: rpc.Health
    address: str


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference_pb2_grpc.InferenceServicer(), server)
    inference_pb2_grpc.add_ControlServicer_to_server(inference_pb2_grpc.ControlServicer(), server)
    health = rpc.add_introspection(server, [INFERENCE, CONTROL])
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    yield Running(server, health, f"127.0.0.1:{port}")
    await server.stop(None)


async def test_grpcurl_lists_describes_and_sees_the_status_of_a_refused_call(running: Running) -> None:
    listed = (await grpcurl("list", address=running.address)).stdout.split()
    assert listed == [
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        CONTROL,
        INFERENCE,
    ]
    described = (await grpcurl("describe", f"{INFERENCE}.Generate", address=running.address)).stdout
    assert "rpc Generate ( .octavo.v1.GenerateRequest ) returns ( stream .octavo.v1.GenerateResponse )" in described
    unknown = await grpcurl("describe", f"{INFERENCE}.Nothing", address=running.address)
    assert unknown.code and "Symbol not found" in unknown.stderr
    everything = await grpcurl("describe", address=running.address)  # fails if any listed service has no descriptor
    assert everything.code == 0 and "grpc.reflection.v1.ServerReflection is a service" in everything.stdout
    refused = await grpcurl(f"{INFERENCE}/Generate", address=running.address, data={"prompt": "x"})
    assert refused.code == 64 + grpc.StatusCode.UNIMPLEMENTED.value[0]
    servers = await grpcurl("grpc.channelz.v1.Channelz/GetServers", address=running.address)
    assert servers.messages[0]["server"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_answers_in_both_versions(running: Running, version: str) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        assert INFERENCE in [service.name for service in answer.list_services_response.service]


async def test_liveness_is_there_at_once_and_readiness_when_it_is_set(running: Running) -> None:
    async def check(service: str) -> str:
        answer = await grpcurl("grpc.health.v1.Health/Check", address=running.address, data={"service": service})
        return answer.messages[0]["status"] if answer.code == 0 else str(answer.code)

    assert [await check(name) for name in ("", INFERENCE, CONTROL)] == ["SERVING", "NOT_SERVING", "NOT_SERVING"]
    await running.health.set_ready(True)
    assert [await check(name) for name in ("", INFERENCE, CONTROL)] == ["SERVING", "SERVING", "SERVING"]
    await running.health.set_ready(False, INFERENCE)
    assert [await check(name) for name in ("", INFERENCE, CONTROL)] == ["SERVING", "NOT_SERVING", "SERVING"]
    assert await check("octavo.v1.Nothing") == str(64 + grpc.StatusCode.NOT_FOUND.value[0])


async def test_watch_pushes_changes_to_those_who_stay_when_another_leaves(running: Running) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    request = health_pb2.HealthCheckRequest(service=INFERENCE)
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stays, leaves = stub.Watch(request), stub.Watch(request)
        assert (await stays.read()).status == (await leaves.read()).status == not_serving
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves.read()
        await running.health.set_ready(True)
        assert (await stays.read()).status == serving
        await running.health.shut_down()
        assert (await stays.read()).status == not_serving
        assert await stays.read() is grpc.aio.EOF
        await running.health.set_ready(True)  # too late
        assert (await stub.Check(request)).status == not_serving


async def test_messages_beyond_grpcs_own_limit_pass() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary("/test.Echo/Echo")
        assert len(await call(bytes(8 * 1024 * 1024))) == 8 * 1024 * 1024
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(rpc.MAX_MESSAGE_BYTES + 1))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def test_a_port_in_use_is_one_clear_line(running: Running) -> None:
    port = int(running.address.rpartition(":")[2])
    with pytest.raises(ports.PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
        rpc.bind(grpc.aio.server(options=rpc.SERVER_OPTIONS), "127.0.0.1", port)


async def test_a_host_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(ports.BindError, match=r"cannot listen on 192\.0\.2\.1:50051: ") as refused:
        rpc.bind(grpc.aio.server(options=rpc.SERVER_OPTIONS), "192.0.2.1", 50051)
    assert not isinstance(refused.value, ports.PortInUse) and "\n" not in str(refused.value)


async def test_a_reserved_port_takes_servers_that_share_it_and_no_others() -> None:
    holder, port = ports.reserve_port("127.0.0.1", 0)
    with holder:
        with pytest.raises(ports.PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            ports.reserve_port("127.0.0.1", port)
        with pytest.raises(ports.PortInUse):
            rpc.bind(grpc.aio.server(options=rpc.SERVER_OPTIONS), "127.0.0.1", port)
        servers = [grpc.aio.server(options=rpc.SHARED_PORT_SERVER_OPTIONS) for _ in range(2)]
        assert [rpc.bind(server, "127.0.0.1", port) for server in servers] == [port, port]
        for server in servers:
            await server.start()
        for server in servers:
            await server.stop(None)


@pytest.mark.parametrize("options", [rpc.SERVER_OPTIONS, rpc.SHARED_PORT_SERVER_OPTIONS], ids=["alone", "shared"])
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("streams", [False, True])
async def test_compressed_messages_are_refused_before_they_are_made_whole(
    options: tuple[tuple[str, int], ...], compression: grpc.Compression, streams: bool
) -> None:
    received: list[int] = []

    async def one(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        received.append(len(request))
        return b""

    async def many(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            received.append(len(request))
        yield b""

    server = grpc.aio.server(options=options)
    methods = {"One": grpc.unary_unary_rpc_method_handler(one), "Many": grpc.stream_stream_rpc_method_handler(many)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("it", methods)])
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    for data in (b"a", bytes(32 << 20)):  # the second is 32 kB on the wire
        code, details = await asyncio.to_thread(_ask_compressed, port, data, compression, streams)
        assert code is grpc.StatusCode.UNIMPLEMENTED and "is disabled" in details
    await server.stop(None)
    assert not received


def _ask_compressed(port: int, data: bytes, compression: grpc.Compression, streams: bool) -> tuple[Any, str]:
    """Status and details. With grpc's blocking client: that of asyncio answers INTERNAL by itself where a stream is
    refused while it still writes."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        if streams:
            call: Any = channel.stream_stream("/it/Many")(iter([data]), compression=compression)
        else:
            call = channel.unary_unary("/it/One").future(data, compression=compression)
        return call.code(), call.details()


async def test_an_answer_of_a_step_may_be_larger_than_any_other_message() -> None:
    """As one with logprobs of the whole vocabulary for many samples is; what comes to a worker is no larger."""
    size = rpc.MAX_MESSAGE_BYTES + 1

    async def answer(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return bytes(size)

    server = grpc.aio.server(options=rpc.WORKER_SERVER_OPTIONS)
    handlers = {"Answer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Large", handlers)])
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.WORKER_CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary("/test.Large/Answer")
            assert len(await call(b"")) == size
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(bytes(size))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await server.stop(None)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the environment sends calls; nobody answers there."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def of_a_client(address: str) -> grpc.aio.Channel:
    return Servers(address, None, grpc.aio.insecure_channel, grpc.aio.secure_channel).current.channel


def of_a_command(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=rpc.client_options(address))


def to_a_worker(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=rpc.WORKER_CHANNEL_OPTIONS)


@pytest.mark.parametrize("channel_of", [of_a_client, of_a_command, to_a_worker])
async def test_no_proxy_gets_what_stays_on_this_machine(
    channel_of: Callable[[str], grpc.aio.Channel], running: Running, proxy: socket.socket
) -> None:
    async with channel_of(running.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(BlockingIOError):
        proxy.accept()


@pytest.mark.parametrize("channel_of", [of_a_client, of_a_command])
async def test_a_scheduler_on_another_machine_is_reached_by_the_proxy(
    channel_of: Callable[[str], grpc.aio.Channel], proxy: socket.socket
) -> None:
    loop = asyncio.get_running_loop()
    async with channel_of("scheduler.invalid:50051") as channel:
        channel.get_state(try_to_connect=True)
        connection, _ = await asyncio.wait_for(loop.sock_accept(proxy), 20)
        with connection:
            asked = await asyncio.wait_for(loop.sock_recv(connection, 4096), 20)
    assert asked.startswith(b"CONNECT scheduler.invalid:50051")


async def test_a_scheduler_asks_no_proxy_for_its_workers(proxy: socket.socket) -> None:
    async with to_a_worker("worker.invalid:50061") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"worker\.invalid"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    with pytest.raises(BlockingIOError):
        proxy.accept()
