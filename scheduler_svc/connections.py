"""Ends a client's connection from this side.

gRPC lets a server end calls, not connections, and a call that was reset has cost what it costs by then. But the socket
is this process's own: it is found among the open files by its peer and shut down, and gRPC finds the client gone.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from urllib.parse import unquote

_OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


def cut_connection(peer: str) -> bool:
    """`peer` as gRPC names it (`ipv4:10.0.0.7:41234`, `ipv6:%5B::1%5D:41234`); False where there is no such socket.

    Looks at every open file: some milliseconds where there are a thousand. A host may use one port of its own for
    connections to several of ours, and grpc does not say to which: all of them are cut.
    """
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return False
    wanted = (host.strip("[]"), int(port))
    return any([_shut_down(int(name), wanted) for name in os.listdir(_OPEN_FILES)])  # a list: not only the first


def _shut_down(number: int, wanted: tuple[str, int]) -> bool:
    try:
        duplicate = os.dup(number)  # the number may be another file's by the time that it is looked at; this is not
    except OSError:
        return False
    try:
        found = socket.socket(fileno=duplicate)
    except OSError:  # no socket
        os.close(duplicate)
        return False
    with found, suppress(OSError):  # one that listens has no peer
        if found.family in (socket.AF_INET, socket.AF_INET6):
            host, port = found.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) == wanted:
                found.shutdown(socket.SHUT_RDWR)
                return True
    return False
