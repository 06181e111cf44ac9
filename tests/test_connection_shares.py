"""Many connections of one host: another one gets in, and who streams or has few loses none. Over real sockets."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from octavo.shared import connection_shares, connections
from octavo.shared.connection_shares import CROWDED_SHARE, ConnectionShares, equal_share
from octavo.shared.connections import OTHER_FILES, Connection
from scheduler_svc.api.grpc_server import new_server
from scheduler_svc.config import SchedulerConfig
from tests.fuzz import http2_frames as http2
from tests.waiting import until

MAX_CONNECTIONS = 64
STREAM = "/test.Clock/Tick"


@pytest.mark.parametrize(
    ("counts", "total", "share"),
    [
        ([1024], 896, 896),
        ([1000, 24], 896, 872),
        ([512, 512], 896, 448),
        ([300, 300, 300, 4], 896, 297),
        ([5, 4], 896, 5),
        ([], 896, 0),
        ([1] * 1000, 896, 0),
    ],
)
def test_each_may_have_as_much_as_the_others_or_less_if_it_wants_less(
    counts: list[int], total: int, share: int
) -> None:
    assert equal_share(counts, total) == share
    assert sum(min(count, share) for count in counts) <= total


@contextmanager
def _connections(hosts: list[str]) -> Iterator[tuple[list[socket.socket], list[str]]]:
    """To one port of this process, from these hosts of loopback, and their peers' names.

    Only these are looked at: what ran before in this process may have left some that are not closed yet.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=len(hosts)))
        clients = []
        for host in hosts:
            address = listener.getsockname()
            clients.append(stack.enter_context(socket.create_connection(address, source_address=(host, 0))))
            stack.enter_context(listener.accept()[0])
        names, all_of_process = {client.getsockname() for client in clients}, connections.client_connections

        def ours() -> list[Connection]:
            return [each for each in all_of_process() if each.peer in names]

        patch.setattr(connection_shares, "client_connections", ours)
        yield clients, ["ipv4:{}:{}".format(*client.getsockname()) for client in clients]


def _are_cut(clients: list[socket.socket]) -> list[bool]:
    found = []
    for client in clients:
        client.setblocking(False)
        try:
            found.append(client.recv(1) == b"")
        except BlockingIOError:
            found.append(False)
    return found


def test_of_the_host_with_most_the_latest_without_a_call_are_cut() -> None:
    few, many = ["127.0.0.3"] * 6, ["127.0.0.9"] * 34
    with _connections([*many[:14], *few, *many[14:]]) as (clients, peers):
        calling = {*peers[:2], *peers[-20:]}  # two of the oldest and the latest of the many
        shares = ConnectionShares(max_connections=40, peers_with_calls=lambda: calling)
        for _ in range(2):  # those that were cut are still there: nobody is cut in their place
            assert shares.look() == {"127.0.0.9": 5}
            assert _are_cut(clients) == [*[False] * 9, *[True] * 5, *[False] * 26]


def test_many_hosts_with_some_connections_each_keep_no_other_out() -> None:
    with _connections([f"127.0.1.{number % 10 + 1}" for number in range(40)]) as (clients, _):
        cut = ConnectionShares(40, peers_with_calls=list).look()
        assert cut == {f"127.0.1.{number}": 1 for number in range(1, 11)}
        assert sum(_are_cut(clients)) == 10


def test_hosts_with_few_connections_lose_none_however_many_hosts_there_are() -> None:
    with _connections([f"127.0.1.{number}" for number in range(1, 41)]) as (clients, _):
        assert not ConnectionShares(40, peers_with_calls=list).look()
        assert not any(_are_cut(clients))


def test_open_files_are_counted_before_anything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look() -> list[Connection]:
        looks.append(1)
        return []

    monkeypatch.setattr(connection_shares, "client_connections", look)
    monkeypatch.setattr(connection_shares, "num_open_files", lambda: 35)
    ConnectionShares(40, peers_with_calls=list).look()
    assert not looks
    monkeypatch.setattr(connection_shares, "num_open_files", lambda: 36)
    ConnectionShares(40, peers_with_calls=list).look()
    assert looks


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Of a server that streams a byte every tenth of a second to whoever asks for it."""

    async def tick(data: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield data
            await asyncio.sleep(0.1)

    server = new_server(SchedulerConfig(max_connections=MAX_CONNECTIONS))
    handlers = {"Tick": grpc.unary_stream_rpc_method_handler(tick)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Clock", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def _stream(address: str) -> socket.socket:
    connection = http2.connection(address)
    connection.sendall(http2.call(1, STREAM) + http2.message(1, b"x"))
    return connection


def _is_open(connection: socket.socket) -> bool:
    """Whether what is sent next still comes; all that had come is read."""
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


async def test_another_host_gets_in_while_one_has_all_connections_and_its_streams_go_on(address: str) -> None:
    with ExitStack() as stack:

        def connect(connection: Callable[[str], socket.socket]) -> socket.socket:
            return stack.enter_context(connection(address))

        first_streams = [await asyncio.to_thread(connect, _stream) for _ in range(4)]
        idle = [await asyncio.to_thread(connect, http2.connection) for _ in range(MAX_CONNECTIONS)]
        async with grpc.aio.insecure_channel(address) as channel:  # from 127.0.0.1, the others from another
            async with asyncio.timeout(10):
                stream = channel.unary_stream(STREAM)(b"x", wait_for_ready=True)
                assert await stream.read() == b"x"
            num_idle = sum(map(_is_open, idle))
            assert MAX_CONNECTIONS // 2 < num_idle < MAX_CONNECTIONS * CROWDED_SHARE
            for each in first_streams:
                assert _is_open(each)
                await asyncio.to_thread(_wait_for_more, each)
            assert await stream.read() == b"x"


def _wait_for_more(connection: socket.socket) -> None:
    connection.settimeout(5)
    assert connection.recv(65_536)


async def _check_soon(is_so: Callable[[], object]) -> None:
    await until(is_so)


async def test_the_watch_ends_with_its_server() -> None:
    before = len(connection_shares._watches)
    server = new_server(SchedulerConfig())
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert len(connection_shares._watches) == before + 1
    await server.stop(None)
    await _check_soon(lambda: len(connection_shares._watches) == before)


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(shares: ConnectionShares) -> Counter[str]:
        looks.append(1)
        raise OSError("too many open files")

    monkeypatch.setattr(ConnectionShares, "look", look)
    monkeypatch.setattr(connection_shares, "LOOK_INTERVAL_S", 0.01)
    server = new_server(SchedulerConfig())
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await _check_soon(lambda: len(looks) >= 3)
    await server.stop(None)


def test_as_many_files_may_be_open_as_there_may_be_connections() -> None:
    """A system's usual 1024 are less than those of all connections and what else a scheduler has open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 600 + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no process may have {wanted} files open here")
    program = (
        "import resource\n"
        "from octavo.shared.connections import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "allow_open_files(600)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "allow_open_files(1)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(wanted)] * 2
