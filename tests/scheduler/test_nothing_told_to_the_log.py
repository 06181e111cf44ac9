"""No text or token of a request is in a log, at any level, whatever is wrong with it or with us."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from octavo.shared import log
from octavo.shared.rpc import bind
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc, worker_pb2
from scheduler_svc.api import control_service
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull, RequestRefused, UnknownName, Unsupported
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.output_processor import take_tokens
from scheduler_svc.output.output_stream import OutputStream
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.requests import text_process
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frames import Answer, Ask
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import PreparedText, RequestText
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.tiny_served_model import tiny_served_model

SECRET, SECRET_ID = "Zyzzyva", 987654  # what a client says, not a password
LENGTH = FinishReason.LENGTH
SHOWN = {"request_id"}  # names the request in every line about it

REFUSALS: list[Exception] = [
    QueueFull("4 requests wait", 1.0),
    DuplicateRequest(f"request {SECRET!r} is live already"),
    NotReady("draining"),
    UnknownName(f"adapter {SECRET!r}"),
    Unsupported(f"{SECRET} is not implemented"),
    KeyError(SECRET),
    ValueError(f"invalid literal for int() with base 10: {SECRET!r}"),
]


class RefusingCore:
    """Takes requests, or fails over them in the way that is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.boxes: Mailboxes

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        return

    def refused(self, refusal: RequestRefused) -> None:
        return

    async def submit(self, group: SequenceGroup, *, replaces: bool) -> None:
        if self.error is not None:
            raise self.error
        stream: RequestStream = group.output
        asyncio.get_running_loop().call_soon(self._answer, stream)

    def _answer(self, stream: RequestStream) -> None:
        sequences = np.array(stream.group.sequences, object)
        token_ids, reasons = np.full(len(sequences), ord("a"), np.int32), np.full(len(sequences), LENGTH, np.uint8)
        tokens = NewTokens(sequences, token_ids, np.arange(len(sequences)), reasons)
        self.boxes.ring(partial(take_tokens, tokens, worker_pb2.SequenceOutputs(), stream.group.arrival_ns))

    def forget(self, group: SequenceGroup) -> None:
        return

    def abandon(self, group: SequenceGroup) -> None:
        return

    async def abort(self, request_id: str) -> bool:
        raise KeyError(request_id + SECRET)

    async def adapters(self) -> list[str]:
        return []


class InlineTexts:
    """What text processes do, in this one."""

    def __init__(self, text: RequestText) -> None:
        self._text = text

    async def prepare(self, data: bytes) -> PreparedText:
        return self._text.prepare(pb.GenerateRequest.FromString(data))

    async def tokenize(self, data: bytes) -> bytes:
        return self._text.tokenize(pb.TokenizeRequest.FromString(data)).SerializeToString()

    async def detokenize(self, data: bytes) -> bytes:
        return self._text.detokenize(pb.DetokenizeRequest.FromString(data)).SerializeToString()


class Harness:
    def __init__(self, core: RefusingCore, lines: io.StringIO, channel: grpc.aio.Channel) -> None:
        self.core, self.lines = core, lines
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.control = inference_pb2_grpc.ControlStub(channel)
        self.codes: list[grpc.StatusCode] = []

    async def generate(self, request: pb.GenerateRequest) -> None:
        await self.note(self.inference.Generate(request, timeout=10))

    async def note(self, call: Any) -> None:
        try:
            if hasattr(call, "read"):
                while await call.read() is not grpc.aio.EOF:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError:
            pass
        self.codes.append(await call.code())

    def check(self) -> None:
        told = self.lines.getvalue()
        assert SECRET not in told and str(SECRET_ID) not in told, told


@pytest.fixture
async def harness(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    lines = io.StringIO()
    monkeypatch.setattr("sys.stderr", lines)
    log.configure("debug")
    model, core = tiny_served_model(tmp_path), RefusingCore()
    core.boxes = Mailboxes(asyncio.get_running_loop())
    any_core: Any = core
    texts: Any = InlineTexts(RequestText(model, TextSettings()))
    frontend = Frontend(lambda: ServedModels.of(model), lambda _: None)
    inference = InferenceService(frontend, texts, any_core, core.boxes, Admission(100, 1 << 24))
    loop = Loop()
    loop.engine.start()
    serving: Any = type("Serving", (), {"engine": loop.engine, "pool": None})
    control = ControlService(serving, SchedulerConfig(), lambda: None)
    server, _ = public_server(SchedulerConfig(), inference, partial(control_service.add_to_server, control))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Harness(core, lines, channel)
    await server.stop(None)
    loop.engine.stop()


def fields(descriptor: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    """Paths to all fields of text, and to all lists of token ids."""
    for field in descriptor.fields:
        path = (*before, field.name)
        if field.message_type is not None and field.name != "logit_bias":
            yield from fields(field.message_type, path)
        elif field.type == FieldDescriptor.TYPE_STRING or field.is_repeated:
            yield path, field


def put(message: Message, path: tuple[str, ...], text: str) -> None:
    """Sets the field at `path`, text or token ids, making what lies before it."""
    *before, last = path
    for name in before:
        inner = getattr(message, name)
        message = inner.add() if hasattr(inner, "add") else inner
    field = message.DESCRIPTOR.fields_by_name[last]
    if field.name == "logit_bias":
        getattr(message, last)[SECRET_ID] = 1.0
    elif field.type == FieldDescriptor.TYPE_STRING:
        getattr(message, last).append(text) if field.is_repeated else setattr(message, last, text)
    else:
        getattr(message, last).extend([SECRET_ID, 65, SECRET_ID] * (len(text) // len(SECRET)))


PATHS = [path for path, _ in fields(pb.GenerateRequest.DESCRIPTOR) if path[-1] not in SHOWN]


def test_fields_of_text_are_found() -> None:
    names = {".".join(path) for path in PATHS}
    expected = {"prompt", "messages.messages.content", "sampling_params.stop", "sampling_params.bad_words", "tenant"}
    assert expected <= names and "sampling_params.guided.choice.choices" in names and "resume.token_ids" in names


@pytest.mark.parametrize("path", PATHS, ids=".".join)
async def test_a_secret_in_one_field_is_not_told(harness: Harness, path: tuple[str, ...]) -> None:
    """In a request that is admitted or refused for it, too long, beside something else that is wrong, twice."""
    for text in (SECRET, SECRET * 1000):
        for changes in ({}, {"temperature": 9.0}, {"detokenize": False}, {"n": 1000}, {"stop": [""]}, {"seed": 5}):
            request = pb.GenerateRequest(request_id="it", sampling_params=pb.SamplingParams(max_tokens=1, **changes))
            if path[0] not in ("prompt", "prompt_token_ids", "messages"):
                request.prompt = "abc"
            if path[:2] == ("messages", "messages"):
                request.messages.messages.add(role="user", content="x")
            put(request, path, text)
            await harness.generate(request)
    request = pb.GenerateRequest(prompt="abc")
    put(request, path, SECRET)
    put(request, path, SECRET)
    request.sampling_params.stop_token_ids.append(SECRET_ID)
    await harness.generate(request)
    harness.check()
    assert {*harness.codes} - {grpc.StatusCode.OK}, "nothing was refused"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_fault_of_ours_and_a_refusal_of_the_core_tell_nothing(harness: Harness, error: Exception) -> None:
    harness.core.error = error
    await harness.generate(pb.GenerateRequest(request_id="it", prompt=SECRET, tenant=SECRET))
    assert harness.codes[0] != grpc.StatusCode.OK
    (line,) = harness.lines.getvalue().splitlines()
    assert '"request_id": "it"' in line and (type(error).__name__ in line or str(error) in line)
    harness.check()


@pytest.mark.parametrize("where", ["take", "write", "_text_of"])
async def test_an_output_that_fails_tells_where_and_not_what(
    harness: Harness, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise KeyError(SECRET) from ValueError(SECRET)

    monkeypatch.setattr(OutputStream, where, fails)
    await harness.generate(pb.GenerateRequest(request_id="it", prompt=SECRET))
    harness.check()
    told = harness.lines.getvalue()
    assert "KeyError" in told and "ValueError" in told and "in fails" in told


async def test_text_of_other_calls_is_not_told_either(harness: Harness) -> None:
    inference, control = harness.inference, harness.control
    for call in (
        inference.Tokenize(pb.TokenizeRequest(prompt="", model=SECRET)),
        inference.Tokenize(pb.TokenizeRequest(prompt=SECRET * 10_000)),
        inference.Tokenize(pb.TokenizeRequest(messages=pb.Messages(messages=[pb.ChatMessage(content=SECRET)]))),
        inference.Detokenize(pb.DetokenizeRequest(token_ids=[SECRET_ID])),
        inference.Abort(pb.AbortRequest(request_id="it")),
        control.GetRequest(pb.GetRequestRequest(request_id=SECRET)),
        control.GetBlocks(pb.GetBlocksRequest(worker=SECRET)),
        control.ListRequests(pb.ListRequestsRequest(page_token=SECRET)),
    ):
        await harness.note(call)
    assert grpc.StatusCode.OK not in harness.codes and len(set(harness.codes)) == 3
    harness.check()


def test_a_text_process_that_fails_tells_where_and_not_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to the process that asked, which logs it."""

    class Broken:
        def prepare(self, request: pb.GenerateRequest) -> None:
            raise KeyError(request.prompt)

    text = text_process._Text()
    monkeypatch.setattr(text, "_texts", Broken())
    kind, payload = text.answer(Ask.PREPARE, pb.GenerateRequest(prompt=SECRET).SerializeToString())
    assert kind is Answer.FAILED and SECRET not in payload.decode() and "in prepare" in payload.decode()
    error = RuntimeError(SECRET)
    error.add_note(payload.decode())
    assert "in prepare" in log.trace(error) and SECRET not in log.trace(error)
