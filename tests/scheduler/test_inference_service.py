"""The `Inference` service by itself: what it asks of the core before it puts work into a request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.errors import NotReady, QueueFull, RequestRefused
from scheduler_svc.inference_service import InferenceService
from scheduler_svc.mailboxes import Mailboxes


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
