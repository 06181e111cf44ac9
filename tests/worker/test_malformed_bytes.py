"""Bytes that are no message, sent to every method of a worker."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.shared import log
from protos import worker_pb2
from tests import malformed_bytes
from worker_svc.config import WorkerConfig
from worker_svc.server import WorkerServer


async def test_each_is_refused_with_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()
    monkeypatch.setattr("sys.stderr", lines)
    log.configure("debug")
    config = WorkerConfig(port=0)
    nothing: Any = SimpleNamespace(config=config)
    server = WorkerServer(nothing, nothing, nothing)
    await server._server.start()
    try:
        service = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
        answers = await malformed_bytes.statuses(f"127.0.0.1:{server.port}", [service])
    finally:
        await server._server.stop(None)
    assert len(answers) > 15
    malformed_bytes.check(answers, lines.getvalue())
