"""The connections of clients, seen and ended from this side.

gRPC lets a server end calls, not connections, and a call that was reset has cost what it costs by then. But the sockets
are this process's own: they are found among its open files and shut down, and gRPC finds the client gone.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

import structlog

log = structlog.get_logger()

_OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
OTHER_FILES = 512  # that a process has open beside connections of clients: workers, pipes, libraries

Address = tuple[str, int]


class Connection(NamedTuple):
    """One that a client has made. Of two the later one has mostly the higher number: the lowest free one is given."""

    number: int  # of the file
    peer: Address


def num_open_files() -> int:
    """At least as many as there are connections, and counted in a tenth of the time."""
    return len(os.listdir(_OPEN_FILES))


def allow_open_files(num_connections: int) -> None:
    """Raises this process's limit of open files for so many connections, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            log.warning("the system allows too few open files for --max-connections", allowed=allowed, needed=needed)


def address_of(peer: str) -> Address | None:
    """The address in gRPC's name of a peer (`ipv4:10.0.0.7:41234`, `ipv6:%5B::1%5D:41234`); None for other names."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def client_connections() -> list[Connection]:
    """Connections to ports on which this process listens. Takes some milliseconds where there are a thousand."""
    listened: set[int] = set()
    connected: list[tuple[int, Connection]] = []  # with the port of this side
    for number in _open_files():
        with suppress(OSError), _network_socket(number) as found:
            port = found.getsockname()[1]
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listened.add(port)
            else:
                connected.append((port, Connection(number, _peer(found))))
    return [connection for port, connection in connected if port in listened]


def cut_connection(peer: str) -> bool:
    """`peer` as gRPC names it; False where there is no such socket.

    Looks at every open file. A host may use one port of its own for connections to several of ours, and grpc does not
    say to which: all of them are cut.
    """
    wanted = address_of(peer)
    return wanted is not None and any([shut_down(number, wanted) for number in _open_files()])  # not only the first


def shut_down(number: int, peer: Address) -> bool:
    """Ends the connection with `peer` that has this number; False where it is no more, or is another's."""
    with suppress(OSError), _network_socket(number) as found:
        if _peer(found) == peer:
            found.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _open_files() -> Iterator[int]:
    return map(int, os.listdir(_OPEN_FILES))


def _network_socket(number: int) -> socket.socket:
    """Raises OSError for a file that is no connection."""
    duplicate = os.dup(number)  # the number may be another file's by the time that it is looked at; this is not
    try:
        found = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        found.close()
        raise OSError("not of a network")
    return found


def _peer(found: socket.socket) -> Address:
    host, port = found.getpeername()[:2]  # one that listens has none: OSError
    return host.removeprefix("::ffff:"), port
