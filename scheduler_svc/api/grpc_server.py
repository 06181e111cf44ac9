"""The gRPC server that clients reach: what one of them may use of it, and the guard before every method."""

from __future__ import annotations

import grpc

from octavo.shared.connection_shares import ConnectionShares, watch
from octavo.shared.connections import allow_open_files
from octavo.shared.rpc import SERVER_OPTIONS, SHARED_PORT_SERVER_OPTIONS
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.open_calls import OpenCalls
from scheduler_svc.api.request_guard import RequestGuard, read_timeout_s
from scheduler_svc.config import SchedulerConfig

HANDSHAKE_TIMEOUT_MS = 10_000
MAX_CONNECTION_IDLE_MS = 600_000


def new_server(
    config: SchedulerConfig, *, shares_port: bool = False, authority: Authority | None = None
) -> grpc.aio.Server:
    """A server without services that listens nowhere yet. For the event loop that runs.

    A request of more than `max_request_bytes` is RESOURCE_EXHAUSTED before it is read. Beyond
    `max_concurrent_streams` calls at once over one connection the client's own library lets calls wait; beyond
    `max_connections` connections are closed as they come, and hosts with many lose some shortly before. `shares_port`:
    other processes of this scheduler listen on the port, too, each with bounds of its own. `authority`:
    see `RequestGuard`.
    """
    options = {
        **dict(SHARED_PORT_SERVER_OPTIONS if shares_port else SERVER_OPTIONS),
        "grpc.max_receive_message_length": config.max_request_bytes,
        "grpc.max_concurrent_streams": config.max_concurrent_streams,
        "grpc.max_allowed_incoming_connections": config.max_connections,
        # Else calls of clients that keep to the number of streams are refused, too: those that have ended still count.
        "grpc.http.overload_protection": 0,
        "grpc.max_connection_idle_ms": MAX_CONNECTION_IDLE_MS,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS,
    }
    if config.max_connection_age:
        options["grpc.max_connection_age_ms"] = int(config.max_connection_age * 1e3)  # open calls end in peace
    allow_open_files(config.max_connections)
    calls = OpenCalls(config.max_open_calls)
    guard = RequestGuard(calls, read_timeout_s(config.max_request_bytes), authority)
    server = grpc.aio.server(options=tuple(options.items()), interceptors=(guard,))
    watch(server, ConnectionShares(config.max_connections, calls.peers))
    return server
