"""A step loop that hangs: found from another thread, told with what it does, and the end of the service."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.engine import turn_watch
from scheduler_svc.engine.turn_watch import Turns, TurnWatch
from scheduler_svc.vital_parts import VitalParts
from tests.fakes import FakeWorker, say_forever
from tests.waiting import wait_until

SCHEDULER = """
import sys, threading
from scheduler_svc import server
from scheduler_svc.engine import turn_watch
from scheduler_svc.engine.events import Events
turn_watch.TICK_S, turn_watch.MAX_TICKS, server.BROKEN_END_S = 0.1, 10, 2.0

def hang_over_it(*_):
    threading.Event().wait()

Events.submitted = hang_over_it
from octavo.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Turning:
    """A thread that turns until it is told to hang, or to end."""

    def __init__(self) -> None:
        self.turns, self.vital = Turns(), VitalParts()
        self.ends, self.hangs = threading.Event(), threading.Event()
        self.watch = TurnWatch("part", self.turns, self.vital)
        self.thread = threading.Thread(target=self._turn, daemon=True)

    def _turn(self) -> None:
        while not self.ends.is_set():
            self.turns.note()
            if self.hangs.is_set():
                self._hang_here()
            time.sleep(0.001)

    def _hang_here(self) -> None:
        self.ends.wait()


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turning]:
    monkeypatch.setattr(turn_watch, "TICK_S", 0.02)
    monkeypatch.setattr(turn_watch, "MAX_TICKS", 20)
    it = Turning()
    it.watch.start()
    yield it
    it.watch.stop()
    it.ends.set()


def _wait_for_failure(vital: VitalParts) -> str:
    wait_until(lambda: vital.failure)
    return vital.failure


def test_a_thread_that_hangs_is_found_and_what_it_does_is_logged(
    turning: Turning, capfd: pytest.CaptureFixture[str]
) -> None:
    turning.thread.start()
    time.sleep(0.6)  # half as long again as it may stand still
    assert not turning.vital.failure
    turning.hangs.set()
    assert _wait_for_failure(turning.vital) == "part: TimeoutError: no turn of it for 0.4 s"
    assert "_hang_here" in "".join(capfd.readouterr())


def test_a_thread_that_has_not_begun_or_was_told_to_end_does_not_hang(turning: Turning) -> None:
    time.sleep(0.6)
    assert not turning.vital.failure, "it has not begun"
    turning.thread.start()
    while not turning.turns.count:
        time.sleep(0.001)
    turning.watch.stop()
    turning.hangs.set()
    time.sleep(0.6)
    assert not turning.vital.failure


def test_a_scheduler_whose_step_loop_hangs_says_so_and_ends_with_1() -> None:
    port = free_port()
    with FakeWorker(say_forever("la")) as worker:
        flags = [f"--port={port}", f"--worker={worker.address}", "--metrics-port=0"]
        process = subprocess.Popen(
            [sys.executable, "-c", SCHEDULER, "scheduler", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
                statuses = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=30)
                while next(statuses).status != health_pb2.HealthCheckResponse.SERVING:
                    pass
                call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="hi"), timeout=30)
                assert next(statuses).status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.RpcError):
                    list(call)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "hang_over_it" in output and "step-loop" in output
