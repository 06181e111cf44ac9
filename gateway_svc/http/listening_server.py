"""A server of uvicorn whose TLS connections are counted before they shake hands, and not only after that."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import structlog
import uvicorn

from gateway_svc.http.bounded_protocol import Bounds, bounded

log = structlog.get_logger()

_PAUSE_S = 0.1  # where no connection can be accepted: too many files are open


class ListeningServer(uvicorn.Server):
    """uvicorn's, for connections that keep to `bounds`; options are those of `uvicorn.Config`."""

    def __init__(self, app: Any, bounds: Bounds, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded(bounds),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                **options,
            )
        )
        self._bounds, self._tls = bounds, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        for each in sockets or []:
            each.listen(self.config.backlog)
            listener: Any = _TlsListener(each, self._tls, self._bounds, self._connections, self._new_protocol)
            self.servers.append(listener)

    def _new_protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = made(self.config, self.server_state, self.lifespan.state)
        return protocol

    def _connections(self) -> int:
        return len(self.server_state.connections)


class _TlsListener:
    """Like the servers of an event loop, as far as uvicorn uses them. A connection that shakes hands has to be through
    with it in the time of a request, and makes room for a newer one."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        bounds: Bounds,
        num_connections: Callable[[], int],
        new_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._tls, self._bounds = listener, tls, bounds
        self._num_connections, self._new_protocol = num_connections, new_protocol
        self._loop = asyncio.get_running_loop()
        self._shaking_hands: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Accepts no more."""
        for task in (self._accepting, *self._shaking_hands):
            task.cancel()

    async def wait_closed(self) -> None:
        """Until that is so."""
        await asyncio.gather(self._accepting, *self._shaking_hands, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                self._bounds.strangers.write(log.warning, "no connection can be accepted", why=error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            num_connections = len(self._shaking_hands) + self._num_connections()
            if self._shaking_hands and num_connections >= self._bounds.max_connections:
                oldest = next(iter(self._shaking_hands))
                del self._shaking_hands[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._shake_hands(accepted))
            self._shaking_hands[task] = None
            task.add_done_callback(lambda task: self._shaking_hands.pop(task, None))

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            timeout_s = self._bounds.read_timeout_s
            await self._loop.connect_accepted_socket(
                self._new_protocol, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            pass  # it speaks no TLS, shows no certificate, or has left
