"""`--log-prompts`: each request and its answer are one line, whichever way it came and however it ended."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from octavo.embedded.options import read_options
from octavo.shared import log
from octavo.shared.options import OptionError
from octavo.shared.rpc import bind
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output import prompt_log
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.prompt_log import PromptLog
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import RequestText
from tests.scheduler.scripted_core import InlineTexts, ScriptedCore
from tests.scheduler.tiny_served_model import tiny_served_model

EVENT = "prompt and answer"


class Service:
    def __init__(self, core: ScriptedCore, prompts: PromptLog, lines: io.StringIO, stub: Any) -> None:
        self.core, self.prompts, self._lines, self.stub = core, prompts, lines, stub

    async def ask(self, says: str = "yes", **fields: Any) -> None:
        """One request that is answered so, letter by letter, or refused."""
        fields.setdefault("sampling_params", pb.SamplingParams(max_tokens=9))
        call = self.stub.Generate(pb.GenerateRequest(**fields), timeout=10)
        name = fields["request_id"]
        reading = asyncio.create_task(_read(call))
        while name not in self.core.groups and not reading.done():
            await asyncio.sleep(0.001)
        if name in self.core.groups:
            for letter in says[:-1]:
                self.core.say({name: letter})
            self.core.say({name: says[-1]}, FinishReason.LENGTH)
        await reading

    async def lines(self) -> list[dict[str, Any]]:
        """Those of requests, once all are written."""
        await asyncio.to_thread(self.prompts.stop)
        return [line for line in self.said() if line["event"] == EVENT]

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines.getvalue().splitlines()]


async def _read(call: Any) -> None:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass


@pytest.fixture
async def service(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    lines = io.StringIO()
    monkeypatch.setattr("sys.stderr", lines)
    log.configure("info")
    async with serving(tmp_path, lines) as service:
        yield service


@asynccontextmanager
async def serving(folder: Any, lines: io.StringIO) -> AsyncIterator[Service]:
    model, core = tiny_served_model(folder), ScriptedCore()
    core.boxes = Mailboxes(asyncio.get_running_loop())
    texts: Any = InlineTexts(RequestText(model, TextSettings()))
    any_core: Any = core
    prompts = SchedulerConfig(log_prompts=True).prompt_log()
    assert prompts is not None
    prompts.start()
    frontend = Frontend(lambda: ServedModels.of(model), lambda _: None)
    inference = InferenceService(frontend, texts, any_core, core.boxes, Admission(100, 1 << 24), prompts=prompts)
    server, _ = public_server(SchedulerConfig(), inference, lambda server: None)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Service(core, prompts, lines, inference_pb2_grpc.InferenceStub(channel))
    await server.stop(None)


async def test_a_line_has_what_was_asked_and_answered_and_whose_it_was(service: Service) -> None:
    await service.ask("aye", request_id="one", prompt="Marker?", tenant="acme")
    messages = pb.Messages(messages=[pb.ChatMessage(role="user", content="Marker!")])
    await service.ask("no", request_id="two", messages=messages, stream=False)
    await service.ask(
        "ab",
        request_id="ids",
        prompt_token_ids=pb.TokenIds(ids=[65, 66]),
        sampling_params=pb.SamplingParams(max_tokens=9, detokenize=False),
    )
    one, two, ids = await service.lines()
    assert (one["request_id"], one["tenant"], one["prompt"], one["answers"]) == ("one", "acme", "Marker?", ["aye"])
    assert (one["finish"], one["completion_tokens"], one["level"]) == (["LENGTH"], 3, "info")
    assert (two["messages"], two["answers"]) == ([{"role": "user", "content": "Marker!"}], ["no"])
    assert (ids["prompt_token_ids"], ids["answers_token_ids"]) == ([65, 66], [[ord("a"), ord("b")]])


async def test_a_refused_request_and_one_whose_client_left_have_their_lines_too(service: Service) -> None:
    await service.ask(request_id="hot", prompt="Marker", sampling_params=pb.SamplingParams(temperature=99.0))
    call = service.stub.Generate(pb.GenerateRequest(request_id="left", prompt="Marker", sampling_params={}))
    while "left" not in service.core.groups:
        await asyncio.sleep(0.001)
    call.cancel()
    while not service.core.abandoned:
        await asyncio.sleep(0.001)
    refused, left = await service.lines()
    assert (refused["request_id"], refused["refused"], refused["prompt"]) == ("hot", "InvalidRequest", "Marker")
    assert "temperature" in refused["why"]
    assert (left["request_id"], left["broken_off"], left["prompt"], left["answers"]) == ("left", True, "Marker", [])


async def test_requests_over_one_call_have_a_line_each(service: Service) -> None:
    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        for key, name in enumerate(("a", "b"), start=1):
            request = pb.GenerateRequest(request_id=name, prompt=f"Marker {name}", sampling_params={"max_tokens": 1})
            yield pb.GenerateManyRequest(key=key, request=request.SerializeToString())

    call = service.stub.GenerateMany(requests())
    reading = asyncio.create_task(_read(call))
    while len(service.core.groups) < 2:
        await asyncio.sleep(0.001)
    service.core.say({"a": "x", "b": "y"}, FinishReason.LENGTH)
    await asyncio.wait_for(reading, 5)
    lines = await service.lines()
    assert {(line["prompt"], *line["answers"]) for line in lines} == {("Marker a", "x"), ("Marker b", "y")}


async def test_one_that_cannot_be_logged_does_not_keep_the_next_from_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(text: str, length: int) -> str:
        raise KeyError(text)

    with monkeypatch.context() as broken:
        broken.setattr(prompt_log, "_cut", fails)
        await service.ask(request_id="bad", prompt="Quetzal")
        while service.prompts.num_waiting:
            await asyncio.sleep(0.001)
    await service.ask(request_id="good", prompt="yes")
    lines = await service.lines()
    assert [(line["request_id"], line.get("prompt")) for line in lines] == [("bad", None), ("good", "yes")]
    (fault,) = [line for line in service.said() if line["level"] == "error"]
    assert "Quetzal" not in fault["exception"] and fault["request_id"] == "bad"


async def test_lines_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_log, "MAX_CHARS", 4)
    await service.ask("abcdefg", request_id="long", prompt="0123456789")
    older = [pb.ChatMessage(role="user", content=word) for word in ("older", "old", "new!")]
    await service.ask(request_id="chat", messages=pb.Messages(messages=older))
    long, chat = await service.lines()
    assert (long["prompt"], long["answers"], long["answers_cut_by_chars"]) == ("0123 ... (10 characters)", ["abcd"], 3)
    assert [each["content"] for each in chat["messages"]] == ["(2 earlier messages)", "new!"]


async def test_what_a_model_thought_counts_and_is_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_log, "MAX_CHARS", 96)
    messages = [pb.ChatMessage(role="assistant", content=word, reasoning_content=70 * word) for word in "xyz"]
    await service.ask(request_id="chat", messages=pb.Messages(messages=messages))
    (line,) = await service.lines()
    assert [(each["content"], each.get("reasoning_content")) for each in line["messages"]] == [
        ("(2 earlier messages)", None),
        ("z", 70 * "z"),
    ]


async def test_what_the_thread_cannot_keep_up_with_is_left_out_and_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a log that nobody reads."""
    monkeypatch.setattr(prompt_log, "MAX_WAITING", 2)
    monkeypatch.setattr(prompt_log, "MAX_WAITING_BYTES", 60)
    may_go_on = threading.Event()
    written = partial(_after, may_go_on, prompt_log.log.info)
    monkeypatch.setattr(prompt_log, "log", type("Held", (), {"info": staticmethod(written)}))
    await service.ask(request_id="first", prompt="Marker")
    for name in ("second", "third", "fourth", "fifth"):
        await service.ask(request_id=name, prompt="Marker" * 3)
    may_go_on.set()
    lines = await service.lines()
    names = [line["request_id"] for line in lines]
    assert names[0] == "first" and len(names) < 5
    assert sum(line.get("left_out", 0) for line in lines) == 5 - len(names)


def _after(event: threading.Event, write: Callable[..., None], *words: str, **fields: object) -> None:
    assert event.wait(10)
    write(*words, **fields)


async def test_a_request_too_large_for_what_waits_has_a_line_without_its_prompt(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_log, "MAX_WAITING_BYTES", 10)
    await service.ask(request_id="large", prompt="Marker" * 3)
    (line,) = await service.lines()
    assert line["prompt_left_out"] and "prompt" not in line and line["answers"] == ["yes"]


def test_it_is_off_unless_asked_for_and_never_asked_for_in_vain() -> None:
    assert SchedulerConfig().prompt_log() is None
    with pytest.raises(
        ValueError, match="log_prompts writes lines of level info, which log_level 'warning' leaves out"
    ):
        SchedulerConfig(log_prompts=True, log_level="warning")
    with pytest.raises(OptionError, match="log_prompts: an LLM"):
        read_options("tiny", {"log_prompts": True})
