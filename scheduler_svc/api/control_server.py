"""`Control` on a port of its own (`--control-port`), so that a network can keep clients away from it."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import structlog

from octavo.shared.rpc import add_introspection, bind
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.grpc_server import new_server
from scheduler_svc.api.public_server import CONTROL, GRACE_S, credentials_of
from scheduler_svc.config import SchedulerConfig

log = structlog.get_logger()


async def serve_control(
    config: SchedulerConfig, add_control: Callable[[grpc.aio.Server], None]
) -> ControlServer | None:
    """`add_control` adds whatever answers it. None: it is served beside `Inference`. Raises BindError, OptionError."""
    if config.control_port is None:
        return None
    server = new_server(config, authority=Authority.of(config))
    add_control(server)
    health = add_introspection(server, [CONTROL])
    port = bind(server, config.host, config.control_port, credentials_of(config))
    await server.start()
    await health.set_ready(True)
    log.info("control is served", port=port)
    return ControlServer(server)


class ControlServer:
    """One that listens."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    async def close(self) -> None:
        """Open calls have GRACE_S to end."""
        await self._server.stop(GRACE_S)
