"""`GET /metrics` on a port of its own: clients of the API are not told of each other's traffic.

On loopback unless told otherwise (`--metrics-host`), as the gateway knows no keys that could lock it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.config import GatewayConfig
from gateway_svc.http.bounded_protocol import Bounds
from gateway_svc.http.listening import listen_at
from gateway_svc.http.listening_server import ListeningServer
from gateway_svc.http.metrics import GatewayMetrics
from octavo.shared.access.tls import ServerTls
from octavo.shared.ports import BindError, check_port_is_free, reserve_port

log = structlog.get_logger()

METRICS_PORT = 9465
PATH = "/metrics"
MAX_CONNECTIONS = 32  # Prometheus needs one
TIMEOUT_S = 5.0  # for a request to be here, and for its answer to be read


def metrics_listener(config: GatewayConfig) -> socket.socket | None:
    """Where they are served; None: nowhere, as the default port is taken. Raises BindError for a port that was asked
    for."""
    if not config.serves_metrics:
        return None
    port = METRICS_PORT if config.metrics_port is None else config.metrics_port
    try:
        if not config.shares_port:
            check_port_is_free(config.metrics_host, port, "--metrics-port")
        listener = listen_at(config.metrics_host, port, shares_port=config.shares_port)
    except BindError as error:
        _tell(config, error)
        return None
    log.info("metrics are served", host=config.metrics_host, port=listener.getsockname()[1])
    return listener


def reserved_metrics(config: GatewayConfig) -> tuple[socket.socket, int] | None:
    """A port that processes of this service may share, held for them; None and BindError as above."""
    port = METRICS_PORT if config.metrics_port is None else config.metrics_port
    try:
        return reserve_port(config.metrics_host, port)
    except BindError as error:
        _tell(config, error)
        return None


def _tell(config: GatewayConfig, error: BindError) -> None:
    """Raises BindError for a port that was asked for."""
    if config.metrics_port is not None:
        raise BindError(f"metrics: {error}") from None
    log.warning("metrics are not served; --metrics-port names another port", port=METRICS_PORT, why=str(error))


def metrics_server(metrics: GatewayMetrics, tls: ServerTls | None = None) -> uvicorn.Server:
    """What listens, with the certificates of the API; it ends when its `should_exit` is set."""

    async def respond(request: Request) -> Response:
        content, content_type = metrics.text()
        return Response(content, headers={"content-type": content_type})

    bounds = Bounds(MAX_CONNECTIONS, TIMEOUT_S, TIMEOUT_S)
    app = Starlette(routes=[Route(PATH, respond)])
    return _Server(app, bounds, None if tls is None else tls.context(), timeout_graceful_shutdown=1)


class _Server(ListeningServer):
    """Signals are for the server of the API."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
