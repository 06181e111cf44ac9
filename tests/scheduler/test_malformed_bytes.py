"""Bytes that are no message, sent to every method of a scheduler."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.shared import log
from octavo.shared.rpc import bind
from protos import inference_pb2 as pb
from scheduler_svc.api import control_service
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_reader import parse, read_generate_request
from tests import malformed_bytes


class InlineTexts:
    """Reads as a text process does, and no more than that."""

    async def prepare(self, data: bytes) -> Any:
        return parse(read_generate_request, data, "/octavo.v1.Inference/Generate")

    async def tokenize(self, data: bytes) -> Any:
        return parse(pb.TokenizeRequest.FromString, data, "/octavo.v1.Inference/Tokenize")

    async def detokenize(self, data: bytes) -> Any:
        return parse(pb.DetokenizeRequest.FromString, data, "/octavo.v1.Inference/Detokenize")


async def test_each_is_refused_with_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()
    monkeypatch.setattr("sys.stderr", lines)
    log.configure("debug")
    config = SchedulerConfig()
    serving: Any = SimpleNamespace(engine=None)
    nothing: Any = None
    texts: Any = InlineTexts()
    frontend = Frontend(ServedModels, lambda _: None)
    inference = InferenceService(frontend, texts, nothing, Mailboxes(asyncio.get_running_loop()), Admission(9, 9999))
    control = ControlService(serving, config, lambda: None)
    server, _ = public_server(config, inference, lambda server: control_service.add_to_server(control, server))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    services = [pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Control")]
    try:
        answers = await malformed_bytes.statuses(f"127.0.0.1:{port}", services)
    finally:
        await server.stop(None)
    assert len(answers) > 25
    malformed_bytes.check(answers, lines.getvalue())
