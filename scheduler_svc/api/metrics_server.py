"""`GET /metrics` over HTTP/1, on one thread, for a bounded number of connections of bounded length.

Whoever connects has to ask at once and gets one answer. A connection that dawdles is closed after a while, or as soon
as its place is wanted: it holds neither a thread nor anybody else up. The text is `prometheus_client`'s; its own server
gives each client a thread for as long as he likes, 65 to 64 that say nothing (`python -m benchmarks.beside_libraries`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from octavo.shared.access.callers import Callers, UnknownCaller
from octavo.shared.access.keys import CONTROL, METRICS, Caller
from octavo.shared.access.tls import ServerTls, server_tls
from octavo.shared.few_lines import FewLines
from octavo.shared.ports import BindError
from octavo.shared.watched_files import LOOK_AGAIN_S
from scheduler_svc.api.authority import Authority
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

METRICS_PORT = 9464
MAX_CONNECTIONS = 32  # Prometheus needs one
MAX_HEAD_BYTES = 8192
TIMEOUT_S = 5.0  # for the whole of a connection, the answer's way included
PATHS = ("/metrics", "/")
OPEN_METRICS = "application/openmetrics-text"


class MetricsServer:
    """Serves what `collector` tells, from now on. Raises OSError when it cannot listen there."""

    def __init__(
        self,
        collector: Collector,
        host: str,
        port: int,
        vital: VitalParts | None = None,
        callers: Callers | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """`callers`: only those with role metrics or control are answered; None: everybody is."""
        self._callers, self._tls, self._strangers = callers, tls, FewLines()
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        if callers is not None or tls is not None:
            self._registry.register(_AccessFiles(callers, tls))
        self._socket = _listening_socket(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._context: ssl.SSLContext | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # the oldest first
        self._was_stopped = False
        self._thread = (vital or VitalParts()).thread("metrics", self._run, lambda: self._was_stopped)
        self._thread.start()

    def stop(self) -> None:
        """Closes the socket and returns when the thread has ended; may be called twice."""
        self._was_stopped = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended before its time
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._context = None if self._tls is None else self._tls.context()
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MAX_HEAD_BYTES)
        while self._tls is not None and not self._stopping.is_set():
            self._tls.look_again()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._stopping.wait()
        await self._stopping.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest, its_writer = next(iter(self._connections.items()))
            del self._connections[oldest]
            its_writer.transport.abort()
            oldest.cancel()
        self._connections[task] = writer
        try:
            with contextlib.suppress(TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
                async with asyncio.timeout(TIMEOUT_S):
                    if self._context is not None:  # here, as who says nothing is to be counted before a handshake, too
                        await writer.start_tls(self._context, ssl_handshake_timeout=TIMEOUT_S)
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except asyncio.CancelledError:
            pass  # its place was wanted, or the server ends
        except Exception:
            log.exception("metrics could not be told")
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()  # does nothing to one that is closed

    def _answer(self, head: bytes) -> bytes:
        request, *lines = head.decode("latin-1").split("\r\n")
        method, path, *_ = [*request.split(), "", ""]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET is answered\n")
        if path.partition("?")[0] not in PATHS:
            return _response(HTTPStatus.NOT_FOUND, "text/plain", b"the metrics are at /metrics\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if self._callers is not None:
            caller = _caller(self._callers, fields.get("authorization", ""))
            if caller is None or not caller.roles & {METRICS, CONTROL}:
                status = HTTPStatus.UNAUTHORIZED if caller is None else HTTPStatus.FORBIDDEN
                name = None if caller is None else caller.name
                self._strangers.write(log.info, "metrics refused", code=status.phrase, key=name)
                return _response(status, "text/plain", b"a key with role metrics is wanted\n")
        content, content_type = told(self._registry, fields.get("accept", ""))
        return _response(HTTPStatus.OK, content_type, content, method == "HEAD")


class _AccessFiles(Collector):
    """Whether keys and certificates that were changed could be read; the old ones are in force where they could not."""

    def __init__(self, callers: Callers | None, tls: ServerTls | None) -> None:
        keys = None if callers is None else callers.keys
        tokens = None if callers is None else callers.tokens
        self._files = {"keys": keys, "jwks": None if tokens is None else tokens.source, "certificates": tls}

    def collect(self) -> Iterator[Metric]:
        """Looks at the files first."""
        text = "Changed keys or certificates that could not be read, so that the old ones are in force"
        failures = CounterMetricFamily("octavo:access_file_failures", text, labels=["file"])
        for name, files in self._files.items():
            if files is not None:
                files.look_again()
                failures.add_metric([name], files.num_failures)
        yield failures


def _caller(callers: Callers, header: str) -> Caller | None:
    try:
        return callers.of_header(header)
    except UnknownCaller:
        return None


def told(registry: CollectorRegistry, accept: str = OPEN_METRICS) -> tuple[bytes, str]:
    """All metrics and their content type: OpenMetrics, which has exemplars, for who accepts that."""
    if OPEN_METRICS not in accept:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # With the escaping that is for names of any kind: with every other the library writes octavo_x for octavo:x.
    text = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]  # of the library
    return text, openmetrics.CONTENT_TYPE_LATEST


def _response(status: HTTPStatus, content_type: str, body: bytes, is_head: bool = False) -> bytes:
    challenge = "WWW-Authenticate: Bearer\r\n" if status is HTTPStatus.UNAUTHORIZED else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{challenge}\r\n"
    )
    return head.encode() + (b"" if is_head else body)


def _listening_socket(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=MAX_CONNECTIONS)


def serve_metrics(collector: Collector, config: SchedulerConfig, vital: VitalParts) -> MetricsServer | None:
    """Raises BindError for a port that was asked for and cannot be had."""
    authority = Authority.of(config)
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    port = METRICS_PORT if config.metrics_port is None else config.metrics_port
    try:
        callers = None if authority is None else authority.callers
        server = MetricsServer(collector, config.host, port, vital, callers, tls)
    except OSError as error:
        if config.metrics_port is not None:
            raise BindError(f"cannot serve metrics on {config.host}:{port}: {error.strerror}") from None
        log.warning("metrics are not served; --metrics-port names another port", port=port, why=error.strerror)
        return None
    log.info("metrics are served", port=server.port)
    return server
