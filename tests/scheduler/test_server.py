"""How a scheduler ends: in which order, and when it has to by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from octavo.shared.ports import free_ports
from scheduler_svc import server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontends.front import InProcessFront
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.serving import Serving
from tests.fakes import FakeWorker


async def test_no_request_is_taken_once_those_who_wait_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was would be aborted a moment later, and its client told of an end."""
    is_closed = []

    class Front(InProcessFront):
        async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
            self.serving = serving
            drain()
            return await super().open(serving, drain)

        def break_off(self) -> None:
            is_closed.append(self.serving.engine.is_closed)
            super().break_off()

    monkeypatch.setattr(server, "InProcessFront", Front)
    port, metrics_port = free_ports(2)
    config = SchedulerConfig(worker=("127.0.0.1:1",), port=port, metrics_port=metrics_port)
    await asyncio.wait_for(server.serve(config), 20)
    assert is_closed == [True]


async def test_a_fault_in_telling_readiness_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(front: InProcessFront, is_ready: bool, models: ServedModels) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(InProcessFront, "show", fail)
    with FakeWorker() as worker:
        port, metrics_port = free_ports(2)
        config = SchedulerConfig(worker=(worker.address,), port=port, metrics_port=metrics_port)
        with pytest.raises(OSError, match="no space left"):
            await asyncio.wait_for(server.serve(config), 20)
