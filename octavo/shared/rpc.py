"""What every gRPC server and channel of Octavo shares: limits, keepalive, health, reflection, channelz, binding.

Knows nothing of any particular service. Health follows grpc.health.v1: the empty name is liveness, a full service name
is readiness.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.shared.ports import BindError, check_port_is_free, is_loopback

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # gRPC's own 4 MiB is less than first-time metadata of 256 long prompts

_SHARED_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no bound; a quiet stream is pinged for as long as it lives
    # Messages are not compressed (bit 0: identity alone). gRPC checks the size of one after it has made it whole again:
    # half a mebibyte of gzip was 537 MB in memory before its refusal. Now it is UNIMPLEMENTED, and stays small.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED_OPTIONS,
    # What ends a connection, a minute by default: a server that is stopped or cut off is found within 15 s. One that is
    # busy answers, as below; the 5 s are for a machine that swaps.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),  # a step or a generation sent twice is not the same as sent once
    ("grpc.enable_http_proxy", 0),  # `http_proxy` counts for loopback too, and its host would read keys and tokens
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # half of what our channels do, or they are cut off
)
SERVER_OPTIONS = (*_SERVER_OPTIONS, ("grpc.so_reuseport", 0))  # two servers must not share a port by accident
SHARED_PORT_SERVER_OPTIONS = (*_SERVER_OPTIONS, ("grpc.so_reuseport", 1))  # those of one service do, on purpose

# Between a scheduler and its workers, both ways. Threads of gRPC's core send and answer pings without the interpreter's
# lock: a process that is stopped, cut off or dead is found within 2.5 s, one that is busy with Python loses nothing.
PING_INTERVAL_MS = 500  # without data; the core sends at most one a second from a channel
PING_TIMEOUT_MS = 1_500
_PINGED = {
    "grpc.keepalive_time_ms": PING_INTERVAL_MS,
    "grpc.keepalive_timeout_ms": PING_TIMEOUT_MS,
    "grpc.http2.ping_timeout_ms": PING_TIMEOUT_MS,
}
MAX_WORKER_CONNECTIONS = 256
# Of one step: 8 bytes for each logprob, with --max-logprobs -1 of the whole vocabulary. 256 samples of 262,144 tokens
# are half of this. A larger answer loses the worker, and every request that it has.
MAX_ANSWER_BYTES = 1 << 30
WORKER_CHANNEL_OPTIONS = tuple(
    {**dict(CHANNEL_OPTIONS), **_PINGED, "grpc.max_receive_message_length": MAX_ANSWER_BYTES}.items()
)
WORKER_SERVER_OPTIONS = tuple(
    {
        **dict(SERVER_OPTIONS),
        **_PINGED,
        "grpc.max_send_message_length": MAX_ANSWER_BYTES,
        "grpc.http2.min_ping_interval_without_data_ms": PING_INTERVAL_MS // 2,
        "grpc.max_concurrent_streams": 128,  # a scheduler needs three
        "grpc.max_allowed_incoming_connections": MAX_WORKER_CONNECTIONS,  # beyond them they are closed as they come
        "grpc.server_handshake_timeout_ms": 10_000,
    }.items()
)
# Between a core and its frontends, both ways: of one step's answer, all may be one frontend's.
_LINKED = {"grpc.max_send_message_length": MAX_ANSWER_BYTES, "grpc.max_receive_message_length": MAX_ANSWER_BYTES}
LINK_CHANNEL_OPTIONS = tuple({**dict(CHANNEL_OPTIONS), **_LINKED}.items())
LINK_SERVER_OPTIONS = tuple({**dict(SERVER_OPTIONS), **_LINKED}.items())


def is_here(address: str) -> bool:
    """Whether a target of gRPC is this machine, as far as it says by itself."""
    target = address.removeprefix("dns:///").removeprefix("ipv4:").removeprefix("ipv6:")
    return target.startswith("unix:") or is_loopback(target.rpartition(":")[0].strip("[]"))


def client_options(address: str) -> tuple[tuple[str, int], ...]:
    """Of a channel to a scheduler, which on another machine may be behind the proxy of `http_proxy`."""
    if is_here(address):
        return CHANNEL_OPTIONS
    return tuple({**dict(CHANNEL_OPTIONS), "grpc.enable_http_proxy": 1}.items())


_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc ships no types
    """grpc.health.v1, with any number of watchers a service.

    grpcio's own asyncio servicer forgets all watchers of a service as soon as one of them leaves.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._statuses: dict[str, int] = {"": _SERVING, **dict.fromkeys(service_names, _NOT_SERVING)}
        self._changed = asyncio.Condition()
        self._closed = False

    async def set_ready(self, ready: bool, service_name: str | None = None) -> None:
        """Sets readiness of all services, or of the one named. Without effect after `shut_down`."""
        names = [name for name in self._statuses if name] if service_name is None else [service_name]
        await self._update(dict.fromkeys(names, _SERVING if ready else _NOT_SERVING))

    async def shut_down(self) -> None:
        """Sets everything, liveness too, to NOT_SERVING for good and ends the watchers' streams.

        For the very end, so that watchers do not hold up `stop(grace)`. While draining, `set_ready(False)` is right: a
        process that drains is alive, and an orchestrator that reads otherwise kills it.
        """
        await self._update(dict.fromkeys(self._statuses, _NOT_SERVING), close=True)

    async def _update(self, statuses: dict[str, int], close: bool = False) -> None:
        async with self._changed:
            if not self._closed:
                self._statuses.update(statuses)
                self._closed = close
                self._changed.notify_all()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status at this moment; NOT_FOUND, with the names that there are, for a service that is not here."""
        if request.service not in self._statuses:
            known = ", ".join(sorted(filter(None, self._statuses)))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}; there are {known}")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and whenever it changes; SERVICE_UNKNOWN for one that may still come."""
        status, closed = self._status(request.service), self._closed
        yield health_pb2.HealthCheckResponse(status=status)
        while not closed:
            last = status
            async with self._changed:
                while (status := self._status(request.service)) == last and not self._closed:
                    await self._changed.wait()
                closed = self._closed
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)

    def _status(self, service_name: str) -> int:
        return self._statuses.get(service_name, _SERVICE_UNKNOWN)


def add_introspection(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Adds health, reflection and channelz to a server that is not started yet. Services are not ready at first.

    `service_names` are full names (`octavo.v1.Inference`) of services whose descriptors are imported.
    """
    from grpc_channelz.v1 import channelz  # these two are installed with a service, not with the client

    from octavo.shared.reflection import add_reflection

    health = Health(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)
    add_reflection(server, [*service_names, "grpc.channelz.v1.Channelz", "grpc.health.v1.Health"])
    return health


def behaviour(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    """What a method does, of the one kind of the four that it is."""
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }
    return kinds[handler.request_streaming, handler.response_streaming]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Lets `server` listen on host:port and returns the port (0 takes a free one). Without `credentials` there is no
    TLS. Raises BindError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        taken: int = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:  # grpc does not say why; the socket itself does
        check_port_is_free(host, port)
        raise BindError(f"cannot listen on {address}") from error
    return taken
