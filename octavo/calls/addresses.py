"""A client's schedulers, in the order given: the first is used until it fails, then the next one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from octavo.calls.forks import refuse_in_fork
from octavo.errors import RequestFailed
from octavo.shared.rpc import client_options, is_here
from protos import inference_pb2_grpc as pb_grpc

# A scheduler that comes back is found within about a second; gRPC's own backoff grows to two minutes. The least is also
# what one attempt to connect may take: a host that is gone answers nothing, and the next address waits.
_RECONNECT_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 3000),
]
_WITH_COMMAS = ("ipv4:", "ipv6:", "unix:")  # targets of gRPC that may hold some themselves

Insecure = Callable[..., Any]  # (target, options)
Secure = Callable[..., Any]  # (target, credentials, options)


def split_addresses(addresses: str | Sequence[str]) -> list[str]:
    """`HOST:PORT,HOST:PORT`, or any targets of gRPC in a list. Raises ValueError for none."""
    if isinstance(addresses, str):
        addresses = [addresses] if addresses.startswith(_WITH_COMMAS) else addresses.split(",")
    found = [address.strip() for address in addresses if address.strip()]
    if not found:
        raise ValueError("no address; HOST:PORT is accepted, and several of them")
    return list(dict.fromkeys(found))


_NAME = re.compile(r"[0-9a-z_.-]+")  # of metadata, to gRPC


def check_metadata(metadata: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError, which quotes no value, for what gRPC does not send: its asyncio calls would never end.

    Values are printable ASCII, or any bytes where the name ends with -bin.
    """
    for name, value in metadata:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"metadata: {name!r} is no name; accepted: small letters, digits, '-', '_' and '.'")
        is_sent = isinstance(value, bytes) if name.endswith("-bin") else _is_printable(value)
        if not is_sent:
            accepted = "bytes" if name.endswith("-bin") else "printable ASCII"
            raise ValueError(f"{name}: its value is not {accepted}, which is what gRPC sends")


def _is_printable(value: object) -> bool:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return isinstance(text, str) and text.isascii() and text.isprintable()


def check_key(key: str) -> None:
    """Raises ValueError, which does not quote it, for a key that no header can have: gRPC would show it in an error."""
    if not (key.isascii() and key.isprintable()):
        raise ValueError("api_key: it holds a line's end, or another character that is not printable ASCII")


def check_may_send_key(addresses: str | Sequence[str], *, is_encrypted: bool) -> None:
    """Raises ValueError for a key that would go over a network where everybody reads it."""
    for address in split_addresses(addresses):
        if not (is_encrypted or is_here(address)):
            raise ValueError(
                f"api_key: {address} is another machine, which it would reach as plain text; TLS (credentials, --tls), "
                "or plaintext_key where the network is to be trusted"
            )


class Server:
    """One scheduler: its channel and stubs."""

    def __init__(self, address: str, channel: grpc.Channel | grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.inference = pb_grpc.InferenceStub(channel)
        self.control = pb_grpc.ControlStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class Servers:
    """A client's schedulers. `current` is used until a caller reports that it failed; may be shared between threads.

    Attributes:
        all: whose channels are open.
        is_closed: set by their client when its own caller has closed it, which is no loss of a server.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        insecure: Insecure,
        secure: Secure,
        *,
        own_connection: bool = False,
    ) -> None:
        """`own_connection`: shared with no other client of this process, as gRPC does by itself."""
        self._options = [*_RECONNECT_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
        self._credentials, self._insecure, self._secure = credentials, insecure, secure
        self._addresses = split_addresses(addresses)
        self._at = 0
        self.is_closed = False
        self.all = self._opened()

    def _opened(self) -> list[Server]:
        refuse_in_fork()
        servers = []
        for address in self._addresses:
            options = [*client_options(address), *self._options]
            channel = (
                self._insecure(address, options=options)
                if self._credentials is None
                else self._secure(address, self._credentials, options=options)
            )
            servers.append(Server(address, channel))
        return servers

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> Server:
        """The server to use next. Raises Forked, and RequestFailed once they are closed."""
        self._check()
        return self.all[self._at]

    def failed(self, server: Server) -> None:
        """The next one is used from now on, unless another call has already moved on."""
        if self.all[self._at] is server:
            self._at = (self._at + 1) % len(self.all)

    def in_turn(self) -> list[Server]:
        """Each once, from the current one on. Raises what `current` does."""
        self._check()
        return self.all[self._at :] + self.all[: self._at]

    def _check(self) -> None:
        refuse_in_fork()
        if self.is_closed:
            raise RequestFailed(grpc.StatusCode.CANCELLED, "the client was closed")


class ServersOfLoop(Servers):
    """Those of an `AsyncClient`. A channel of `grpc.aio` is of the event loop that runs when it is made: it is made at
    the first call, so that the client may be made before any loop runs, as that of a module is."""

    _loop: asyncio.AbstractEventLoop | None = None

    def _opened(self) -> list[Server]:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            return []
        return super()._opened()

    def _check(self) -> None:
        super()._check()
        if self._loop is asyncio.get_running_loop():
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("an AsyncClient is for one event loop, and another one has used this: make one in each")
        self.all = self._opened()

    async def close(self) -> None:
        """Closes the channels, if this loop has any."""
        if self._loop is asyncio.get_running_loop():
            for server in self.all:
                await server.channel.close()


def first_failure(failures: Sequence[RequestFailed], num_asked: int) -> RequestFailed | None:
    """The error of a call to all addresses: a refusal by any of them, or else that none answered."""
    refusals = [failure for failure in failures if not failure.is_unanswered]
    if refusals:
        return refusals[0]
    return failures[0] if failures and len(failures) == num_asked else None
