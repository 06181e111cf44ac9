"""The order in which a scheduler ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from octavo.serving_plan import free_port
from scheduler_svc import server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.front import InProcessFront
from scheduler_svc.serving import Serving


async def test_no_request_is_taken_once_those_who_wait_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was would be aborted a moment later, and its client told of an end."""
    is_closed = []

    class Front(InProcessFront):
        async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
            self.serving = serving
            drain()
            return await super().open(serving, drain)

        def break_off(self) -> None:
            is_closed.append(self.serving.engine.live.is_closed)
            super().break_off()

    monkeypatch.setattr(server, "InProcessFront", Front)
    config = SchedulerConfig(worker=("127.0.0.1:1",), port=free_port(), metrics_port=free_port())
    await asyncio.wait_for(server.serve(config), 20)
    assert is_closed == [True]
