"""Calls that clients begin and do not finish, or give up at once: counted, bounded, and cut off over real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.shared.connections import address_of, cut_connection
from octavo.shared.rpc import SERVER_OPTIONS, add_introspection
from protos import inference_pb2 as pb
from scheduler_svc.api import grpc_server, request_guard
from scheduler_svc.api.allowance import AT_ONCE as IDLE_CALLS
from scheduler_svc.api.allowance import PER_S as IDLE_CALLS_PER_S
from scheduler_svc.api.grpc_server import new_server
from scheduler_svc.api.open_calls import MAX_QUIET_HOSTS, QUICK_S, OpenCalls
from scheduler_svc.api.request_guard import RequestGuard
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import QueueFull
from tests.fuzz import http2_frames as http2
from tests.waiting import until

METHOD = "/test.Echo/Echo"


@dataclass
class Clocked:
    """`OpenCalls` of 40 calls in all, so 30 a host, with a clock turned by hand and connections that are none."""

    now_s: float = 100.0
    cut: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = OpenCalls(40, cut=self._cut, clock=lambda: self.now_s)

    def _cut(self, peer: str) -> bool:
        self.cut.append(peer)
        return True

    def give_up(self, peer: str, after_s: float = 0.0, is_useful: bool = False) -> None:
        with self.calls.open(peer) as call:
            self.now_s += after_s
            call.is_useful = is_useful


def test_calls_are_bounded_by_host_and_in_all() -> None:
    it = Clocked()
    with ExitStack() as stack:
        for number in range(30):
            stack.enter_context(it.calls.open(f"ipv4:10.0.0.1:{number}"))
        with pytest.raises(QueueFull, match="30 calls of this host and 30 in all are open"):
            stack.enter_context(it.calls.open("ipv4:10.0.0.1:99"))
        for number in range(10):
            stack.enter_context(it.calls.open(f"ipv6:%5B::1%5D:{number}"))
        with pytest.raises(QueueFull, match="0 calls of this host and 40 in all are open"):
            stack.enter_context(it.calls.open("ipv4:10.0.0.2:1"))
    it.give_up("ipv4:10.0.0.1:1", after_s=1)


def test_who_gives_calls_up_at_once_and_more_than_it_may_is_cut_off_and_nobody_else() -> None:
    it = Clocked()
    for _ in range(IDLE_CALLS):
        it.give_up("ipv4:10.0.0.1:1")
    it.give_up("ipv4:10.0.0.2:1")
    assert not it.cut
    it.give_up("ipv4:10.0.0.1:1", is_useful=True)
    it.give_up("ipv4:10.0.0.1:1", after_s=2 * QUICK_S)
    it.now_s -= 2 * QUICK_S
    assert not it.cut
    it.give_up("ipv4:10.0.0.1:2")
    assert it.cut == ["ipv4:10.0.0.1:2"]
    it.now_s += 1
    for _ in range(IDLE_CALLS_PER_S):
        it.give_up("ipv4:10.0.0.1:3")
    assert len(it.cut) == 1
    it.give_up("ipv4:10.0.0.1:3")
    assert it.cut[1:] == ["ipv4:10.0.0.1:3"]


def test_hosts_are_forgotten_once_they_have_been_quiet() -> None:
    it = Clocked()
    for number in range(2 * MAX_QUIET_HOSTS):
        it.now_s += 0.1
        it.give_up(f"ipv4:10.0.{number // 256}.{number % 256}:1")
    assert len(it.calls._hosts) <= MAX_QUIET_HOSTS + 1


def test_a_connection_is_looked_for_once_however_many_of_its_calls_are_left() -> None:
    it = Clocked()
    for _ in range(3 * IDLE_CALLS):
        it.give_up("ipv4:10.0.0.1:1")
    assert len(it.cut) == 1
    it.now_s += 2
    for _ in range(3 * IDLE_CALLS):
        it.give_up("ipv4:10.0.0.1:1")
    assert len(it.cut) == 2


def test_many_hosts_at_once_are_not_looked_through_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    forget = OpenCalls._forget_quiet_hosts

    def counting(calls: OpenCalls) -> None:
        looks.append(len(calls._hosts))
        forget(calls)

    monkeypatch.setattr(OpenCalls, "_forget_quiet_hosts", counting)
    it = Clocked()
    for number in range(8 * MAX_QUIET_HOSTS):
        it.give_up(f"ipv4:10.0.{number // 256}.{number % 256}:1")
    assert sum(looks) < 16 * MAX_QUIET_HOSTS


def test_the_address_of_a_peer_is_read_from_its_name() -> None:
    assert address_of("ipv4:10.0.0.7:41234") == ("10.0.0.7", 41234)
    assert address_of("ipv6:%5B2001:db8::1%5D:41234") == ("2001:db8::1", 41234)
    assert [address_of(name) for name in ("unix:/a", "unix:", "ipv4:10.0.0.7", "nonsense")] == [None] * 4


@pytest.mark.parametrize(("host", "kind"), [("127.0.0.1", "ipv4"), ("::1", "ipv6")])
def test_one_connection_is_cut_and_its_neighbour_is_not(host: str, kind: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        if kind == "ipv4":
            raise
        pytest.skip("this machine has no IPv6, of which only the reading of names is shown here")
    with listener, ExitStack() as stack:
        pairs = []
        for _ in range(2):
            client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
            pairs.append((client, stack.enter_context(listener.accept()[0])))
        (cut, _), (stays, neighbour) = pairs
        shown = host if kind == "ipv4" else "%5B::1%5D"
        assert cut_connection(f"{kind}:{shown}:{cut.getsockname()[1]}")
        assert cut.recv(1) == b""
        neighbour.sendall(b"x")
        assert stays.recv(1) == b"x"
    for unknown in (f"{kind}:{shown}:1", "unix:", "nonsense"):
        assert not cut_connection(unknown)


def test_all_connections_from_one_port_are_cut() -> None:
    """To two ports of ours, as a system may choose when it connects."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        clients: list[socket.socket] = []
        for listener in listeners:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("127.0.0.1", clients[0].getsockname()[1] if clients else 0))
            client.connect(listener.getsockname())
            stack.enter_context(listener.accept()[0])
            clients.append(client)
        assert cut_connection(f"ipv4:127.0.0.1:{clients[0].getsockname()[1]}")
        assert [client.recv(1) for client in clients] == [b"", b""]


@dataclass
class Echo:
    """A guarded server that answers each message with itself, `received` in all."""

    calls: OpenCalls
    received: list[bytes] = field(default_factory=list)
    address: str = ""
    refuses: bool = False

    async def echo(self, data: bytes, context: Any) -> bytes:
        if self.refuses:
            raise QueueFull("nothing is taken", 1.0)
        self.received.append(data)
        return data

    async def echo_all(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            yield data

    async def ask(self, data: bytes = b"hi", *, waits: bool = False) -> bytes:
        async with grpc.aio.insecure_channel(self.address) as channel:
            answer: bytes = await channel.unary_unary(METHOD)(data, timeout=5, wait_for_ready=waits)
            return answer


@asynccontextmanager
async def served(server: grpc.aio.Server, **behaviors: Any) -> AsyncIterator[str]:
    """The address of a server of these calls, by their names in `test.Echo`; `Stream` is one of streams."""
    handlers = {
        name: (grpc.stream_stream_rpc_method_handler if name == "Stream" else grpc.unary_unary_rpc_method_handler)(one)
        for name, one in behaviors.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@pytest.fixture
async def server() -> AsyncIterator[Echo]:
    it = Echo(OpenCalls(max_calls=100))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RequestGuard(it.calls, read_timeout_s=1.0),))
    async with served(server, Echo=it.echo, Stream=it.echo_all) as it.address:
        yield it
    await until(lambda: not it.calls._num_open)  # who was in the middle of a call is told so in a turn of its own


def _send(connection: socket.socket, data: bytes) -> bool:
    """Whether the other side still took it."""
    with suppress(OSError):
        connection.sendall(data)
        return True
    return False


@pytest.mark.parametrize(
    ("method", "has_message"), [(METHOD, False), (METHOD, True), ("/test.Echo/Nobody", False)], ids=str
)
async def test_a_rapid_reset_ends_the_connection_and_no_other(server: Echo, method: str, has_message: bool) -> None:
    """Begun and reset ten thousand times in a row: some are let pass, then the connection is gone.

    Also where each would be refused. Somebody else waits for less than if every one had been an honest call: all the
    server's work is in this process's time, and what other processes take of the machine meanwhile is not its fault.
    """

    calls = [
        http2.call(stream, method) + http2.message(stream, b"hi") * has_message + http2.reset(stream)
        for stream in range(1, 20_001, 2)
    ]

    def storm() -> bool:
        """Whether it was cut off; where the server hardly runs, all is sent before it has looked at a thousand."""
        with http2.connection(server.address) as connection:
            for number in range(0, len(calls), 100):
                if not _send(connection, b"".join(calls[number : number + 100])) or _is_closed(connection):
                    return True
            return any(_is_closed(connection) for _ in range(1500))  # each waits for 20 ms

    async with grpc.aio.insecure_channel(server.address) as channel:
        echo = channel.unary_unary(METHOD)
        honest = [await _timed(echo(b"before", timeout=5)) for _ in range(100)]
        server.refuses = has_message
        started_s = time.process_time()
        assert await asyncio.to_thread(storm), "it was never cut off"
        server.refuses = False
        assert await echo(b"after", timeout=60) == b"after"
        storm_s = time.process_time() - started_s
        honest += [await _timed(echo(b"later", timeout=5)) for _ in range(100)]
    assert storm_s < len(calls) * sum(honest) / len(honest)
    assert server.received == [b"before"] * 100 + [b"after"] + [b"later"] * 100


async def _timed(call: Any) -> float:
    """Of this process's time, in seconds."""
    started_s = time.process_time()
    await call
    return time.process_time() - started_s


async def test_whoever_is_refused_keeps_its_connection_and_what_else_is_open_on_it(server: Echo) -> None:
    """More refusals than calls that may be given up, as a busy server gives to a proxy: its other calls go on."""
    server.refuses = True
    async with grpc.aio.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(METHOD)
        for _ in range((IDLE_CALLS + 200) // 50):
            for refused in await asyncio.gather(*(_code(ask(b"hi", timeout=5)) for _ in range(50))):
                assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED


async def _code(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    code: grpc.StatusCode = refused.value.code()
    return code


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.02)
    try:
        while connection.recv(65_536):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(http2.TIMEOUT_S)


async def test_calls_without_their_message_are_refused_beyond_a_number() -> None:
    it = Echo(OpenCalls(max_calls=100))
    patient = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RequestGuard(it.calls, read_timeout_s=60.0),))
    async with served(patient, Echo=it.echo) as address:
        with http2.connection(address) as connection:
            await asyncio.to_thread(connection.sendall, _begun(range(1, 150, 2)))
            await until(lambda: it.calls._num_open == 75)
            await asyncio.to_thread(connection.sendall, _begun(range(151, 191, 2)))
            frames = await asyncio.to_thread(_frames_until, connection, lambda kinds: kinds.count(http2.HEADERS) == 20)
            assert frames.count(http2.HEADERS) == 20, "one for each that was refused"
            assert it.calls._num_open == 75
            async with grpc.aio.insecure_channel(address) as beside:  # from another host
                assert await beside.unary_unary(METHOD)(b"beside", timeout=5) == b"beside"


async def test_calls_without_their_message_are_ended_after_a_time(server: Echo) -> None:
    with http2.connection(server.address) as connection:
        await asyncio.to_thread(connection.sendall, _begun([1, 3, 5]))
        await until(lambda: server.calls._num_open)
        await until(lambda: not server.calls._num_open)
    assert await server.ask() == b"hi" and server.received[-1] == b"hi"


def _begun(streams: Iterable[int]) -> bytes:
    """Calls of which nine bytes of the message are still to come."""
    return b"".join(http2.call(stream, METHOD) + http2.begun_message(stream, 9) for stream in streams)


def test_the_largest_request_may_come_slowly() -> None:
    assert request_guard.read_timeout_s(1 << 20) == request_guard.READ_TIMEOUT_S == 30.0
    assert request_guard.read_timeout_s(64 << 20) > 1800, "as slowly as one of a mebibyte"


def test_calls_that_wait_for_news_alone_give_way_to_others_and_not_to_each_other() -> None:
    it = Clocked()
    ended: list[int] = []
    with ExitStack() as stack:
        for number in range(28):
            stack.enter_context(it.calls.open("ipv4:10.0.0.1:1", give_way=partial(ended.append, number)))
        for _ in range(2):
            stack.enter_context(it.calls.open("ipv4:10.0.0.1:2"))
        assert list(it.calls.peers()) == ["ipv4:10.0.0.1:2"]
        with pytest.raises(QueueFull):
            stack.enter_context(it.calls.open("ipv4:10.0.0.1:3", give_way=list))
        stack.enter_context(it.calls.open("ipv4:10.0.0.1:3"))
        assert ended == [27], "the latest"
        for number in range(12):
            stack.enter_context(it.calls.open(f"ipv4:10.0.0.2:{number}"))
        assert ended == [27, 26, 25], "of the host that has most of them"
        for number in range(25):
            stack.enter_context(it.calls.open(f"ipv4:10.0.0.3:{number}"))
        assert ended == list(range(27, -1, -1))
        with pytest.raises(QueueFull, match="40 in all"):
            stack.enter_context(it.calls.open("ipv4:10.0.0.3:99"))
    assert it.calls._num_open == it.calls._num_yielding == 0 and not it.cut


async def test_health_is_watched_for_long_and_gives_way_where_others_need_its_place() -> None:
    """By a reverse proxy, say, whose one host has all calls."""
    it = Echo(OpenCalls(max_calls=4))  # of which one host has three
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RequestGuard(it.calls, read_timeout_s=0.2),))
    health = add_introspection(server, ["octavo.v1.Inference"])
    async with served(server, Echo=it.echo) as it.address, grpc.aio.insecure_channel(it.address) as channel:
        request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
        watches = []
        for _ in range(3):
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(request))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await asyncio.sleep(0.5)  # longer than anybody may take to ask
        assert await it.ask() == b"hi"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watches.pop().read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await health.set_ready(True)
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stream_of_questions_ends_when_none_comes(server: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reflection, which would idle for ever; whoever asks in time is answered for as long: each message has its own."""
    begun: list[float] = []

    def counted(seconds: float) -> asyncio.Timeout:
        begun.append(seconds)
        return asyncio.timeout(seconds)

    monkeypatch.setattr(request_guard, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": counted}))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/test.Echo/Stream")()
        for _ in range(4):
            await call.write(b"x")
            assert await call.read() == b"x"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert begun == [1.0] * 5
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        ended = channel.stream_stream("/test.Echo/Stream")(iter([b"y"]))
        assert [answer async for answer in ended] == [b"y"]


async def test_what_is_read_on_the_event_loop_is_small_whatever_a_request_may_have(server: Echo) -> None:
    """`--max-request-bytes` is for those that text processes read."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        largest = b"x" * request_guard.MAX_OTHER_BYTES
        assert await channel.unary_unary(METHOD)(largest, timeout=5) == largest
        with pytest.raises(grpc.aio.AioRpcError, match="got 65537 bytes; accepted: at most 65536") as refused:
            await channel.unary_unary(METHOD)(largest + b"x", timeout=5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="got 65537 bytes") as refused:
            await channel.stream_stream("/test.Echo/Stream")(iter([largest + b"x"])).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for method in request_guard.LARGE:
        service, _, name = method.strip("/").partition("/")
        assert name in pb.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name


async def test_a_connection_that_never_speaks_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_TIMEOUT_MS", 300)
    async with served(new_server(SchedulerConfig(max_connection_age=0))) as address:
        with http2.plain_connection(address) as silent, http2.connection(address) as speaking:
            assert http2.GOAWAY in await asyncio.to_thread(_frames_until, silent, _tells_to_go)
            assert not await asyncio.to_thread(_is_closed, speaking)


async def test_who_is_connected_for_long_is_asked_to_connect_anew_and_open_calls_end_in_peace() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(data: bytes, context: Any) -> bytes:
        asked.set()
        await answer.wait()
        return data

    server = new_server(SchedulerConfig(max_connection_age=0.2))
    async with served(server, Slow=slow) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/test.Echo/Slow")(b"hi")
        await asked.wait()
        with http2.connection(address) as later:
            assert http2.GOAWAY in await asyncio.to_thread(_frames_until, later, _tells_to_go)
        await asyncio.sleep(0.5)
        answer.set()
        assert await call == b"hi"


def _tells_to_go(kinds: list[int]) -> bool:
    return http2.GOAWAY in kinds


def _frames_until(connection: socket.socket, is_enough: Callable[[list[int]], bool]) -> list[int]:
    """Kinds of the frames that come until these are enough, or the connection is closed."""
    connection.settimeout(5.0)
    data, kinds = b"", list[int]()
    while not is_enough(kinds) and (more := _read(connection, 65_536)):
        data += more
        while len(data) >= 9 and len(data) >= 9 + (length := int.from_bytes(data[:3])):
            kinds.append(data[3])
            data = data[9 + length :]
    return kinds


async def test_calls_beyond_those_of_one_connection_wait_and_are_answered() -> None:
    at_once: list[int] = []
    num_open, four = 0, asyncio.Barrier(4)

    async def slow(data: bytes, context: Any) -> bytes:
        nonlocal num_open
        if data == b"first":
            return data
        num_open += 1
        at_once.append(num_open)
        await four.wait()
        await asyncio.sleep(0.02)  # in which a fifth would come
        num_open -= 1
        return data

    server = new_server(SchedulerConfig(max_concurrent_streams=4))
    async with served(server, Slow=slow) as address, grpc.aio.insecure_channel(address) as channel:
        ask = channel.unary_unary("/test.Echo/Slow")
        assert await ask(b"first") == b"first"  # by now the client has heard of the bound
        answers = await asyncio.gather(*(ask(bytes([number]), timeout=10) for number in range(20)))
    assert answers == [bytes([number]) for number in range(20)]
    assert max(at_once) == 4


async def test_whoever_has_too_many_open_is_told_when_to_try_again() -> None:
    it = Echo(OpenCalls(max_calls=1))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RequestGuard(it.calls),))
    async with served(server, Echo=it.echo) as it.address:
        with it.calls.open("ipv4:10.0.0.1:1"), pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.ask()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert status.details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        assert await it.ask() == b"hi"


async def test_connections_beyond_their_number_are_closed_as_they_come() -> None:
    it = Echo(OpenCalls(max_calls=100))
    async with served(new_server(SchedulerConfig(max_connections=3)), Echo=it.echo) as it.address:
        with ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(http2.connection(it.address))
                assert await asyncio.to_thread(connection.recv, 1)
            beyond = stack.enter_context(http2.connection(it.address))
            assert await asyncio.to_thread(_read, beyond) == b""
        assert await it.ask(waits=True) == b"hi"  # it may not have seen yet that the others are gone


def _read(connection: socket.socket, most: int = 1) -> bytes:
    with suppress(ConnectionError):
        return connection.recv(most)
    return b""
