"""The gRPC server that clients reach: what one of them may use of it, and the guard before every method."""

from __future__ import annotations

import grpc

from octavo.rpc import SERVER_OPTIONS, SHARED_PORT_SERVER_OPTIONS
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.request_guard import RequestGuard


def new_server(config: SchedulerConfig, *, shares_port: bool = False) -> grpc.aio.Server:
    """A server without services that listens nowhere yet.

    A request of more than `max_request_bytes` is RESOURCE_EXHAUSTED before it is read. Beyond
    `max_concurrent_streams` calls at once over one connection the client's own library lets calls wait.
    `shares_port`: other processes of this scheduler listen on the port, too.
    """
    options = {
        **dict(SHARED_PORT_SERVER_OPTIONS if shares_port else SERVER_OPTIONS),
        "grpc.max_receive_message_length": config.max_request_bytes,
        "grpc.max_concurrent_streams": config.max_concurrent_streams,
    }
    return grpc.aio.server(options=tuple(options.items()), interceptors=(RequestGuard(),))
