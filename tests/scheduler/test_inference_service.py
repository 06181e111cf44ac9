"""The `Inference` service by itself: what it asks of the core before it puts work into a request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.errors import NotReady, QueueFull, RequestRefused
from scheduler_svc.frontend import Frontend
from scheduler_svc.inference_service import InferenceService
from scheduler_svc.mailboxes import Mailboxes
from scheduler_svc.output_stream import TOKENS_A_PIECE, OutputStream
from tests.scheduler.tiny_served_model import tiny_served_model


class SlowFrontend:
    """Prepares nothing before it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def prepare(self, request: pb.GenerateRequest, arrival_ns: int) -> Any:
        assert self.may_go_on.wait(10)
        raise NotReady("prepared enough")


class FullCore:
    """Has room for two."""

    def __init__(self) -> None:
        self.refusals: list[RequestRefused] = []

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int) -> None:
        if num_preparing >= 2:
            raise QueueFull("two are enough", 1.0)

    def refused(self, refusal: RequestRefused) -> None:
        self.refusals.append(refusal)


async def test_requests_that_are_being_prepared_count_as_those_that_wait() -> None:
    frontend, core = SlowFrontend(), FullCore()
    service = InferenceService(frontend, core, Mailboxes(asyncio.get_running_loop()))  # type: ignore[arg-type]  # fakes
    calls = [asyncio.create_task(service._prepare(pb.GenerateRequest(), 0)) for _ in range(3)]
    with pytest.raises(QueueFull):
        await calls[2]
    was_idle = service.is_idle
    assert not was_idle and not any(call.done() for call in calls[:2])
    frontend.may_go_on.set()
    for call in calls[:2]:
        with pytest.raises(NotReady):
            await call
    assert service.is_idle and [type(refusal) for refusal in core.refusals] == [QueueFull, NotReady, NotReady]
    service.is_draining = True
    with pytest.raises(NotReady, match="draining"):
        await service._prepare(pb.GenerateRequest(), 0)


class OpenCore:
    """Has room for all."""

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int) -> None:
        return

    def refused(self, refusal: RequestRefused) -> None:
        raise AssertionError("nothing is refused here")


async def test_who_resumes_gives_way_to_others_and_is_dropped_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40,000 tokens looked through for stop strings no two pieces follow one another without a turn of the loop."""
    tiny = tiny_served_model(tmp_path)
    model = dataclasses.replace(tiny, max_model_len=50_000, max_cached_tokens=60_000)
    frontend: Any = Frontend(lambda: model, lambda _: None)
    core: Any = OpenCore()
    service = InferenceService(frontend, core, Mailboxes(asyncio.get_running_loop()))
    pieces: list[str] = []  # of which request, and "-" for each turn of the loop
    resume_with_stops = OutputStream._resume_with_stops

    def noted(stream: OutputStream, token_ids: Any, reason: Any) -> None:
        pieces.append(chr(token_ids[0]))
        resume_with_stops(stream, token_ids, reason)

    monkeypatch.setattr(OutputStream, "_resume_with_stops", noted)

    def request(letter: str, num_tokens: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            request_id=letter,
            prompt="abc",
            resume=[pb.ResumedOutput(index=0, token_ids=[ord(letter)] * num_tokens)],
            sampling_params=pb.SamplingParams(seed=5, stop=["ab" * 512, "b" * 1000 + "a"]),
        )

    gone = asyncio.create_task(service._prepare(request("a", 40_000), 0))
    stays = asyncio.create_task(service._prepare(request("b", 900), 0))
    while not stays.done():
        pieces.append("-")
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert service.is_idle and not (await stays).output.is_behind
    num_done = pieces.count("a")
    for _ in range(50):
        await asyncio.sleep(0)
    assert pieces.count("a") == num_done < 40_000 // TOKENS_A_PIECE
    turns = "".join(pieces).split("-")
    assert pieces.count("b") == -(-900 // TOKENS_A_PIECE) and max(map(len, turns)) == 1
