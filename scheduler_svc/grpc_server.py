"""The gRPC server that clients reach: what one of them may use of it, and the guard before every method."""

from __future__ import annotations

import grpc

from octavo.rpc import SERVER_OPTIONS
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.request_guard import RequestGuard


def new_server(config: SchedulerConfig) -> grpc.aio.Server:
    """A server without services that listens nowhere yet.

    A request of more than `max_request_bytes` is RESOURCE_EXHAUSTED before it is read. Beyond
    `max_concurrent_streams` calls at once over one connection the client's own library lets calls wait.
    """
    options = {
        **dict(SERVER_OPTIONS),
        "grpc.max_receive_message_length": config.max_request_bytes,
        "grpc.max_concurrent_streams": config.max_concurrent_streams,
    }
    return grpc.aio.server(options=tuple(options.items()), interceptors=(RequestGuard(),))
