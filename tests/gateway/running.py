"""A gateway in a thread of the test, before whatever scheduler it is given."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvloop
from openai import OpenAI

from gateway_svc.config import GatewayConfig
from gateway_svc.http.metrics_server import metrics_listener, metrics_server
from gateway_svc.server import listen, new_server, new_service
from gateway_svc.upstream.schedulers import Schedulers
from octavo.retrying import RetryPolicy
from octavo.shared.access.tls import server_tls


class Gateway:
    """Where it is, and ways to ask it."""

    def __init__(self, port: int, metrics_port: int = 0) -> None:
        self.port, self.metrics_port = port, metrics_port
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "sk-of-a-test", "max_retries": 0, **options})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers by their names in lower case, and body of one request; bytes are sent as they are."""
        with self._asking(method, path, body, headers) as response:
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read().decode()

    def streaming(self, path: str, body: dict[str, Any]) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
        """An answer as it comes."""
        return self._asking("POST", path, {**body, "stream": True}, {})

    def metrics(self, path: str = "/metrics") -> tuple[int, dict[str, str], str]:
        """As `ask`, of the port for Prometheus."""
        return Gateway(self.metrics_port).ask("GET", path)

    @contextlib.contextmanager
    def _asking(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, content, {"content-type": "application/json", **given})
            yield connection.getresponse()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON."""
        status, _, text = self.ask("POST", path, body, **headers)
        return status, json.loads(text)


@contextlib.contextmanager
def gateway(scheduler: str, retry: RetryPolicy | None = None, **options: Any) -> Iterator[Gateway]:
    """One that serves from here on, with options of `octavo gateway`."""
    config = GatewayConfig(port=0, metrics_port=0, scheduler=scheduler, **{"drain_timeout": 1.0, **options})
    listener = listen(config)
    loop = uvloop.new_event_loop()
    schedulers = Schedulers(scheduler, retry or RetryPolicy(window_s=5.0, first_delay_s=0.01), config.pass_header)
    tracer = config.new_tracer()
    service = new_service(config, schedulers, tracer)
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    server, metrics = new_server(config, service, tls), metrics_server(service.metrics)
    for_metrics = metrics_listener(config)
    assert for_metrics is not None

    async def serve() -> None:
        telling = asyncio.create_task(metrics.serve(sockets=[for_metrics]))
        await server.serve(sockets=[listener])
        metrics.should_exit = True
        await telling
        await schedulers.close()

    port = listener.getsockname()[1]
    listener.listen()  # so that nobody has to wait until the thread does it
    thread = threading.Thread(target=lambda: asyncio.Runner(loop_factory=lambda: loop).run(serve()), daemon=True)
    thread.start()
    try:
        yield Gateway(port, for_metrics.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        if tracer is not None:
            tracer.close()
