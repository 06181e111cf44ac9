"""Ports of this machine: whether one is free, free ones, and the address at which a listener is reached.

Knows nothing of gRPC, so that a command can say that its port is taken before it imports or loads anything.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Collection

LOOPBACK = "127.0.0.1"
FREE_PORTS = (20_000, 32_000)  # Linux hands out 32,768 and up
_random = random.SystemRandom()  # whoever seeds the module's own would get the same ports again
_given = deque[tuple[int, int | None]]()  # by this process, and what `_mark` returned
MAX_GIVEN = 200  # each has an open file; the listeners of older ones have long started


class BindError(Exception):
    """A server cannot listen where it was told to. The message is one line for the user."""


class PortInUse(BindError):
    """Another process listens on that port."""


def check_port_is_free(host: str, port: int, flag: str = "--port") -> None:
    """Raises BindError where host:port cannot be listened on now; 0 stands for any port that is free.

    `flag` is the option that chooses another one.
    """
    with _bound(host, port, flag):
        pass


def reserve_port(host: str, port: int) -> tuple[socket.socket, int]:
    """Holds a port (0 takes a free one) for servers of this user with SHARED_PORT_SERVER_OPTIONS, on which nobody else
    may listen as long as the socket is open. Raises BindError."""
    holder = _bound(host, port)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: at the bind the port had to be free
    return holder, holder.getsockname()[1]


def _bound(host: str, port: int, flag: str = "--port") -> socket.socket:
    probe = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = socket.socket(family, kind, protocol)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: old connections are no listener
        probe.bind(where)
        return probe
    except OSError as error:
        if probe is not None:
            probe.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is in use by another process; {flag} chooses another") from None
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own, as far as it says by itself."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port() -> int:
    """A port on loopback that nobody listens on now.

    Below the range from which systems hand out ports by themselves: until a child listens nobody gets it by chance.
    """
    return free_ports(1)[0]


def free_ports(count: int, *, besides: Collection[int | None] = ()) -> list[int]:
    """So many of them, no two the same, none of `besides`, and none that was given lately: their listeners may have yet
    to start. On Linux that counts every process of this network namespace that lives, elsewhere this one."""
    ports: list[int] = []
    while len(ports) < count:
        port = _random.randrange(*FREE_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            if port not in besides and all(port != given for given, _ in _given):
                _given.append((port, _mark(port)))
                ports.append(port)
    while len(_given) > MAX_GIVEN:
        _, mark = _given.popleft()
        if mark is not None:
            os.close(mark)
    return ports


def _mark(port: int) -> int | None:
    """Tells other processes that the port is given, as long as the file returned is open; raises OSError where one of
    them told so. It is a socket in Linux' abstract namespace, which no other system has."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX) as mark:
        mark.bind(f"\0octavo-port-{port}")
        return mark.detach()


def reachable(host: str, port: int) -> str:
    """The address by which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::", "[::]"):
        host = LOOPBACK
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
