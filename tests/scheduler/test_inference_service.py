"""The `Inference` service by itself: what it asks before it puts work into a request, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.api.inference_service import MAX_READ_BYTES, InferenceService
from scheduler_svc.engine.engine_core import EngineCore
from scheduler_svc.errors import NotReady, QueueFull, RequestRefused
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.output_stream import TOKENS_A_PIECE, OutputStream
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import PreparedText, RequestText
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.tiny_served_model import tiny_served_model


class SlowTexts:
    """Prepares nothing before it may."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.num_asked = 0

    async def prepare(self, data: bytes) -> Any:
        self.num_asked += 1
        await self.may_go_on.wait()
        raise NotReady("prepared enough")

    async def tokenize(self, data: bytes) -> bytes:
        await self.prepare(data)
        raise AssertionError

    detokenize = tokenize

    def close(self, refusal: RequestRefused) -> None:
        self.closed_by = refusal


class FullCore:
    """Has room for two."""

    def __init__(self, room: int = 2) -> None:
        self.refusals: list[RequestRefused] = []
        self._room = room

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        if num_preparing >= self._room:
            raise QueueFull("two are enough", 1.0)

    def refused(self, refusal: RequestRefused) -> None:
        self.refusals.append(refusal)

    async def catch_up(self) -> None:
        return


def _service(texts: Any, core: Any, admission: Admission, models: list[ServedModels] | None = None) -> InferenceService:
    """`models`: of which the last are known here."""
    known = models or [ServedModels()]
    frontend = Frontend(lambda: known[-1], lambda _: None)
    return InferenceService(frontend, texts, core, Mailboxes(asyncio.get_running_loop()), admission)


async def test_requests_that_are_being_prepared_count_as_those_that_wait() -> None:
    texts, core = SlowTexts(), FullCore()
    service = _service(texts, core, Admission(100, 1 << 20))
    calls = [asyncio.create_task(_prepare(service)) for _ in range(3)]
    with pytest.raises(QueueFull):
        await calls[2]
    was_idle = service.is_idle
    assert not was_idle and not any(call.done() for call in calls[:2])
    texts.may_go_on.set()
    for call in calls[:2]:
        with pytest.raises(NotReady):
            await call
    assert service.is_idle and [type(refusal) for refusal in core.refusals] == [QueueFull, NotReady, NotReady]
    service.drain()
    assert str(texts.closed_by) == "this server is draining"
    with pytest.raises(NotReady, match="draining"):
        await _prepare(service)


@pytest.mark.parametrize("method", ["generate", "tokenize", "detokenize"])
async def test_whatever_takes_text_passes_one_admission(method: str) -> None:
    """A thousand bytes are being prepared; what comes then is refused before anybody looks at it."""
    texts = SlowTexts()
    admission = Admission(max_requests=3, max_bytes=1000)
    service = _service(texts, FullCore(room=100), admission)
    held = asyncio.create_task(_prepare(service, bytes(990)))
    await asyncio.sleep(0)
    ask: Any = {"generate": _prepare, "tokenize": _tokenize, "detokenize": _detokenize}[method]
    with pytest.raises(QueueFull, match="1001 bytes would be prepared, at most 1000 may") as refusal:
        await ask(service, bytes(11))
    assert refusal.value.retry_after_s > 0
    small = [asyncio.create_task(ask(service, bytes(5))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="3 requests are prepared, at most 3 may"):
        await ask(service, b"")
    assert (texts.num_asked, admission.num_bytes) == (3, 1000)
    texts.may_go_on.set()
    assert all(isinstance(each, NotReady) for each in await asyncio.gather(held, *small, return_exceptions=True))
    assert (admission.num_requests, admission.num_bytes) == (0, 0)


class LateTexts:
    """Knows the models of `known`, as the frontend does, and counts how often it is asked."""

    def __init__(self, known: list[ServedModels]) -> None:
        self._known = known
        self.num_asked = 0

    async def prepare(self, data: bytes) -> PreparedText:
        self.num_asked += 1
        request = pb.GenerateRequest.FromString(data)
        return RequestText(self._known[-1].resolve(request.model), TextSettings()).prepare(request)

    async def tokenize(self, data: bytes) -> bytes:
        self.num_asked += 1
        return self._known[-1].resolve(pb.TokenizeRequest.FromString(data).model).name.encode()


class LateCore(FullCore):
    """Another process knows the models already; this one does once it has caught up."""

    def __init__(self, known: list[ServedModels], there: ServedModels) -> None:
        super().__init__()
        self._known = known
        self._there = there

    async def catch_up(self) -> None:
        if self._known[-1] != self._there:
            self._known.append(self._there)

    async def adapters(self) -> list[str]:
        return []


async def test_a_model_that_another_process_knows_already_is_waited_for(tmp_path: Path) -> None:
    model = tiny_served_model(tmp_path)

    def service(*known_first: ServedModel) -> tuple[InferenceService, LateTexts, LateCore]:
        known = [ServedModels.of(*known_first)]
        texts, core = LateTexts(known), LateCore(known, ServedModels.of(*known_first, model))
        return _service(texts, core, Admission(9, 1 << 20), known), texts, core

    request = pb.GenerateRequest(prompt="abc", model="tiny").SerializeToString()
    for first in ((), (dataclasses.replace(model, name="other", fingerprint="f" * 32),)):  # NotReady, UnknownName
        it, texts, core = service(*first)
        group, _ = await _prepare(it, request)
        assert group.model == model.fingerprint and texts.num_asked == 2 and not core.refusals
        it, texts, _ = service(*first)
        assert await it.Tokenize(pb.TokenizeRequest(model="tiny").SerializeToString(), None) == b"tiny"
        it, _, _ = service(*first)
        assert (await it.GetModelInfo(pb.GetModelInfoRequest(model="tiny"), None)).model == "tiny"
        it, _, _ = service(*first)
        listed = await it.ListModels(pb.ListModelsRequest(), None)
        assert [each.name for each in listed.models] == [*(each.name for each in first), "tiny"]
    it, texts, core = service()
    core._there = core._known[-1]
    with pytest.raises(NotReady, match="no worker has joined"):
        await _prepare(it, request)
    assert texts.num_asked == 1, "nothing is new, and nothing is tried again"


async def test_a_request_that_is_alone_is_taken_whatever_its_size() -> None:
    admission = Admission(max_requests=3, max_bytes=10)
    with admission.admit(11):
        assert (admission.num_requests, admission.num_bytes) == (1, 11)


def test_large_requests_leave_room_for_small_ones() -> None:
    admission = Admission(max_requests=100, max_bytes=1 << 20)
    with ExitStack() as stack:
        with pytest.raises(QueueFull, match="at most 786432 may"):
            while True:
                stack.enter_context(admission.admit(20_000))
        for _ in range(20):
            stack.enter_context(admission.admit(10_000))


class InlineTexts:
    """Prepares at once, in this process."""

    def __init__(self, model: ServedModel) -> None:
        self._text = RequestText(model, TextSettings())

    async def prepare(self, data: bytes) -> PreparedText:
        return self._text.prepare(pb.GenerateRequest.FromString(data))


class OpenCore:
    """Has room for all."""

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        return

    def refused(self, refusal: RequestRefused) -> None:
        raise AssertionError("nothing is refused here")


async def test_who_resumes_gives_way_to_others_and_is_dropped_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40,000 tokens looked through for stop strings no two pieces follow one another without a turn of the loop."""
    tiny = tiny_served_model(tmp_path)
    model = dataclasses.replace(tiny, max_model_len=50_000, max_cached_tokens=60_000)
    frontend: Any = Frontend(lambda: ServedModels.of(model), lambda _: None)
    core: Any = OpenCore()
    service = InferenceService(
        frontend,
        InlineTexts(model),  # type: ignore[arg-type]  # a fake
        core,
        Mailboxes(asyncio.get_running_loop()),
        Admission(100, 1 << 20),
    )
    pieces: list[str] = []  # of which request, and "-" for each turn of the loop
    resume_with_stops = OutputStream._resume_with_stops

    def noted(stream: OutputStream, token_ids: Any, reason: Any) -> None:
        pieces.append(chr(token_ids[0]))
        resume_with_stops(stream, token_ids, reason)

    monkeypatch.setattr(OutputStream, "_resume_with_stops", noted)

    def request(letter: str, num_tokens: int) -> bytes:
        return pb.GenerateRequest(
            request_id=letter,
            prompt="abc",
            resume=[pb.ResumedOutput(index=0, token_ids=[ord(letter)] * num_tokens)],
            sampling_params=pb.SamplingParams(seed=5, stop=["ab" * 512, "b" * 1000 + "a"]),
        ).SerializeToString()

    gone = asyncio.create_task(_prepare(service, request("a", 40_000)))
    stays = asyncio.create_task(_prepare(service, request("b", 900)))
    while not stays.done():
        pieces.append("-")
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert service.is_idle and not (await stays)[0].output.is_behind
    num_done = pieces.count("a")
    for _ in range(50):
        await asyncio.sleep(0)
    assert pieces.count("a") == num_done < 40_000 // TOKENS_A_PIECE
    turns = "".join(pieces).split("-")
    late = asyncio.create_task(_prepare(service, request("c", 40_000)))
    while "c" not in pieces:
        await asyncio.sleep(0)
    service.is_draining = True
    monkeypatch.setattr(core, "refused", lambda refusal: None)
    with pytest.raises(NotReady, match="draining"):
        await late
    assert pieces.count("b") == -(-900 // TOKENS_A_PIECE) and max(map(len, turns)) == 1


@pytest.mark.parametrize(("stop", "is_on_the_loop"), [(["ab" * 50], True), (["ab" * 512] * 2, False)])
async def test_a_group_that_takes_long_to_make_is_not_made_on_the_event_loop(
    stop: list[str], is_on_the_loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_served_model(tmp_path)
    core: Any = OpenCore()
    service = _service(InlineTexts(model), core, Admission(9, 1 << 20), [ServedModels.of(model)])
    made_on: list[int] = []
    new_group = Frontend.new_group

    def noted(*arguments: Any) -> Any:
        made_on.append(threading.get_ident())
        return new_group(*arguments)

    monkeypatch.setattr(Frontend, "new_group", noted)
    request = pb.GenerateRequest(prompt="abc", sampling_params=pb.SamplingParams(seed=5, stop=stop))
    group, _ = await _prepare(service, request.SerializeToString())
    assert list(group.sampling_params.stop) == stop
    assert [ident == threading.get_ident() for ident in made_on] == [is_on_the_loop]


class NoWayOut:
    """Of a request that nobody reads."""

    def open(self, stream: RequestStream) -> None:
        pass

    async def write_all(self, stream: RequestStream) -> None:
        pass

    def close(self, stream: RequestStream) -> None:
        pass


async def test_a_large_request_that_had_its_turn_is_taken_though_the_queue_is_full(tmp_path: Path) -> None:
    """One that had none is refused before any work is put into it."""
    model = dataclasses.replace(tiny_served_model(tmp_path), max_model_len=80_000, max_cached_tokens=80_000)
    loop, known = Loop(max_waiting_requests=1), [ServedModels.of(model)]
    loop.submit("waits")
    loop.engine.admitted_before.learn(["r"])
    texts = LateTexts(known)
    service = _service(texts, EngineCore(loop.engine), Admission(9, 1 << 20), known)

    def request(request_id: str) -> bytes:
        prompt = pb.TokenIds(ids=[97] * 70_000)
        resume = [pb.ResumedOutput(index=0, token_ids=[98])]
        params = pb.SamplingParams(seed=1)
        return pb.GenerateRequest(
            request_id=request_id, prompt_token_ids=prompt, resume=resume, sampling_params=params
        ).SerializeToString()

    assert len(request("r")) > MAX_READ_BYTES
    with pytest.raises(QueueFull):
        await service._answer(None, request("new"), NoWayOut())
    assert texts.num_asked == 0
    await service._answer(None, request("r"), NoWayOut())
    assert [group.is_resumed for group in loop.engine.find("r")] == [True]


async def _prepare(service: InferenceService, data: bytes = b"") -> Any:
    return await service._prepare(data, pb.GenerateRequest(), "it", None, 0)


async def _tokenize(service: InferenceService, data: bytes) -> Any:
    return await service.Tokenize(data, None)


async def _detokenize(service: InferenceService, data: bytes) -> Any:
    return await service.Detokenize(data, None)
