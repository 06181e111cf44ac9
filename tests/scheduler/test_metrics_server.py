"""Metrics over HTTP: what Prometheus gets, and what those get who connect and do not ask."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from octavo.cli import main
from octavo.shared.access.tls import ServerTls, TlsFiles
from scheduler_svc.api import metrics_server
from scheduler_svc.api.metrics_server import MAX_CONNECTIONS, MetricsServer


class OneCounter(Collector):
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("octavo:things", "Things", value=7)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(OneCounter(), "127.0.0.1", 0)
    yield server
    server.stop()
    assert not server._thread.is_alive()


def read(server: MetricsServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as response:
        return str(response.read().decode())


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_what_prometheus_reads(server: MetricsServer) -> None:
    for path in ("/metrics", "/", "/metrics?name%5B%5D=x"):
        (family,) = text_string_to_metric_families(read(server, path))
        assert [(sample.name, sample.value) for sample in family.samples] == [("octavo:things_total", 7)]


def test_what_else_is_asked(server: MetricsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for method, path, status in (("GET", "/x", 404), ("POST", "/metrics", 405), ("HEAD", "/metrics", 200)):
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        assert response.status == status and (method == "HEAD") == (not body)
    for accepted, told in (("application/openmetrics-text; version=1.0.0", True), ("text/plain, */*", False)):
        connection.request("GET", "/metrics", headers={"Accept": accepted})
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith(
            "application/openmetrics-text; version=1.0.0" if told else "text/plain; version=0.0.4"
        )
        body = answer.read()
        assert b"octavo:things_total 7.0" in body and body.endswith(b"# EOF\n") is told


@pytest.mark.parametrize("head", [b"\r\n\r\n", b"\xff\xfe \x00\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_no_request_gets_an_answer_and_harms_nobody(server: MetricsServer, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(head)
        assert client.recv(100).startswith(b"HTTP/1.1 40")
    assert "octavo:things" in read(server)


def test_connections_that_do_not_ask_hold_no_threads_and_nobody_up(server: MetricsServer) -> None:
    num_threads = threading.active_count()
    halves = [connect(server) for _ in range(4 * MAX_CONNECTIONS)]
    for half in halves:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost")
    assert "octavo:things" in read(server)
    assert threading.active_count() <= num_threads  # of other tests some may end meanwhile
    assert len(server._connections) <= MAX_CONNECTIONS
    for half in halves[: 2 * MAX_CONNECTIONS]:
        assert not _is_open(half)  # closed for those that came later
        half.close()
    assert "octavo:things" in read(server)
    for half in halves:
        half.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"x" * 20_000])
def test_a_connection_that_dawdles_is_closed(
    server: MetricsServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "TIMEOUT_S", 0.05)
    with connect(server) as client:
        client.sendall(sent)
        assert not _is_open(client)


def test_nor_do_they_before_a_handshake(tmp_path: Path) -> None:
    """A connection that has not shown itself holds a file, of which clients of the scheduler need some."""
    assert main(["certs", str(tmp_path)]) == 0
    tls = ServerTls(TlsFiles(tmp_path / "scheduler.pem", tmp_path / "scheduler.key"))
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    server = MetricsServer(OneCounter(), "127.0.0.1", 0, tls=tls)
    try:
        silent = [connect(server) for _ in range(MAX_CONNECTIONS + 20)]
        for _ in range(5):
            with urllib.request.urlopen(
                f"https://localhost:{server.port}/metrics", timeout=5, context=context
            ) as answer:
                assert b"octavo:things" in answer.read()
        for client in silent[:20]:  # closed for those that came later
            client.settimeout(0.5)
            assert not _is_open(client)
        for client in silent:
            client.close()
    finally:
        server.stop()


def test_a_port_that_is_taken(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(OneCounter(), "127.0.0.1", server.port)


def _is_open(client: socket.socket) -> bool:
    """Waits for the other side's end up to the socket's timeout."""
    try:
        return client.recv(1) != b""
    except ConnectionError:
        return False
    except TimeoutError:
        return True
