"""What `Control` says of workers and their blocks, read from a loop that a test turns by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.control_service import ControlService
from scheduler_svc.worker_client import ConnectionState
from tests.scheduler.hand_turned_loop import Loop

Read = Callable[[], list[pb.WorkerState]]


class Seen:
    """A loop with one worker, and an address that has none."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.link = self.loop.join("here:1")
        self.loop.turn()
        states = {
            "here:1": ConnectionState(pb.WORKER_HEALTH_SERVING, ""),
            "there:1": ConnectionState(pb.WORKER_HEALTH_LOST, "gone"),
        }
        clients = {address: SimpleNamespace(address=address, state=state) for address, state in states.items()}
        serving: Any = SimpleNamespace(engine=self.loop.engine, pool=SimpleNamespace(clients=clients))
        self.service = ControlService(serving, SchedulerConfig(), lambda: None)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_workers_with_and_without_a_lease(seen: Seen) -> None:
    seen.loop.submit("one")
    seen.loop.turn()
    here, there = seen.service._workers()
    assert (here.address, here.health, here.epoch, here.num_running) == ("here:1", pb.WORKER_HEALTH_SERVING, 1, 1)
    assert (here.num_device_blocks, here.num_free_device_blocks) == (32, 31)
    assert (there.address, there.health, there.problem) == ("there:1", pb.WORKER_HEALTH_LOST, "gone")
    assert not there.num_device_blocks


def test_a_worker_that_drains_is_said_to(seen: Seen) -> None:
    notice = worker_pb2.StepResponse(epoch=1, notice=worker_pb2.Notice(draining=worker_pb2.Draining()))
    seen.loop.engine.worker_said(seen.link, notice.SerializeToString())
    seen.loop.turn()
    assert seen.service._workers()[0].health == pb.WORKER_HEALTH_DRAINING


def test_blocks_in_use_and_those_that_are_cached(seen: Seen) -> None:
    seen.loop.engine.submit(seen.loop.group("one", num_tokens=6))
    seen.loop.turn()
    running = seen.service._blocks("here:1")
    assert sorted((block.ref_count, block.cached) for block in running) == [(1, False), (1, True)]
    seen.loop.run_to_end(seen.link)
    blocks = seen.service._blocks("")
    assert {(block.worker, block.ref_count, block.cached, block.on_host) for block in blocks} == {
        ("here:1", 0, True, False)
    }
