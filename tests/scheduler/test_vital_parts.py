"""Parts that the service cannot live without: whichever ends before its time, the service says so and ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from octavo.shared.ports import free_port
from octavo.shared.processes.child_process import start_child
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc import server
from scheduler_svc.api.metrics_server import MetricsServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.errors import NotReady
from scheduler_svc.frontends import kept_processes
from scheduler_svc.frontends.front import InProcessFront
from scheduler_svc.frontends.kept_processes import KeptProcesses
from scheduler_svc.output.output_processor import OutputProcessor
from scheduler_svc.serving import Serving
from scheduler_svc.vital_parts import ServiceBroken, VitalParts
from scheduler_svc.workers.worker_client import WorkerClient
from tests.fakes import FakeWorker
from tests.waiting import wait_until


def fail(*_: object) -> None:
    raise KeyError("broken")


@pytest.mark.parametrize(("target", "why"), [(fail, "KeyError: 'broken'"), (lambda: None, "it ended by itself")])
def test_a_thread_that_ends_before_its_time_is_told_of_once(target: Callable[[], None], why: str) -> None:
    vital, heard = VitalParts(), list[str]()
    vital.on_failure(lambda: heard.append(vital.failure))
    for name in ("first", "second"):
        thread = vital.thread(name, target, lambda: False)
        thread.start()
        thread.join()
    assert heard == [f"first: {why}"] and vital.failure == heard[0]
    vital.on_failure(lambda: heard.append("late"))
    assert heard[1:] == ["late"], "who asks later is told at once"


def test_whoever_asks_while_others_are_told_is_told_once() -> None:
    vital, heard = VitalParts(), list[str]()
    vital.on_failure(lambda: vital.on_failure(lambda: heard.append("meanwhile")))
    vital.fail("one", None)
    assert heard == ["meanwhile"]


def test_a_thread_that_was_told_to_end_may() -> None:
    vital, told = VitalParts(), threading.Event()
    thread = vital.thread("one", lambda: None if told.wait(10) else fail(), told.is_set)
    thread.start()
    told.set()
    thread.join()
    assert vital.failure == ""


async def test_a_task_is_as_vital_as_a_thread_and_may_be_cancelled() -> None:
    vital = VitalParts()
    vital.task("cancelled", asyncio.sleep(10), lambda: False).cancel()
    await asyncio.sleep(0)
    assert vital.failure == ""

    async def break_soon() -> None:
        raise OSError("no more of it")

    vital.task("one", break_soon(), lambda: False)
    with pytest.raises(ServiceBroken, match="one: OSError: no more of it"):
        await asyncio.wait_for(vital.broken(), 5)


LIVING = {
    "step-loop": (Engine, "send_steps"),
    "worker-": (WorkerClient, "_now"),
    "output": (OutputProcessor, "run_pending"),
}


@pytest.mark.parametrize("part", LIVING)
def test_every_thread_of_a_scheduler_is_vital(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    with FakeWorker() as worker:
        serving = Serving(SchedulerConfig(worker=(worker.address,)), lambda delivery: None)
        serving.start()
        try:
            wait_until(lambda: serving.is_ready)
            group = serving.frontend.prepare(pb.GenerateRequest(request_id="one", prompt="say|"))
            monkeypatch.setattr(*LIVING[part], fail)
            serving.engine.submit(group)
            if part == "worker-":
                worker.kill()
            wait_until(lambda: serving.vital.failure)
            assert serving.vital.failure.startswith(part) and "KeyError: 'broken'" in serving.vital.failure
            assert not serving.is_ready
            wait_until(lambda: serving.engine.is_closed)
            with pytest.raises(NotReady):
                serving.engine.submit(serving.frontend.prepare(pb.GenerateRequest(request_id="two", prompt="say|")))
        finally:
            monkeypatch.undo()
            serving.stop()


def test_what_follows_names_is_vital_and_survives_every_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.workers.worker_pool.DNS_INTERVAL_S", 0.01)
    errors = [UnicodeError("label empty or too long"), OverflowError("port"), OSError("no answer")]
    asked = []

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise errors[len(asked) % 3]

    monkeypatch.setattr("scheduler_svc.workers.worker_pool.socket.getaddrinfo", getaddrinfo)
    serving = Serving(SchedulerConfig(worker=("dns:///workers:1",)), lambda delivery: None)
    serving.start()
    try:
        wait_until(lambda: len(asked) > 6)
        assert serving.vital.failure == ""
        monkeypatch.setattr("scheduler_svc.workers.worker_pool.resolve", fail)
        wait_until(lambda: serving.vital.failure)
        assert serving.vital.failure.startswith("worker-names: KeyError")
    finally:
        serving.stop()


@pytest.mark.parametrize("address", ["dns:///a..b:1", f"{'a' * 64}.example:1", "host:0", "host:70000", "dns:///:5"])
def test_an_address_that_cannot_be_looked_up_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT or dns:///NAME:PORT is accepted"):
        SchedulerConfig(worker=(address,))


def test_the_metrics_thread_is_vital(monkeypatch: pytest.MonkeyPatch) -> None:
    vital = VitalParts()
    metrics = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, vital)
    metrics._loop.call_soon_threadsafe(metrics._loop.stop)
    wait_until(lambda: vital.failure)
    assert vital.failure.startswith("metrics: ")
    metrics.stop()
    other = VitalParts()
    MetricsServer(CollectorRegistry(), "127.0.0.1", 0, other).stop()
    assert other.failure == ""


async def test_a_frontend_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_processes, "FIRST_PAUSE_S", 0.01)
    tries: list[int] = []

    async def try_in_vain(command: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        tries.append(1)
        if len(tries) < 4:
            raise OSError("Cannot allocate memory")
        return await start_child(command, environment)

    monkeypatch.setattr(kept_processes, "start_child", try_in_vain)
    vital = VitalParts()
    processes = KeptProcesses("sleeper", lambda number: ["/bin/sleep", "0.3"], 1, vital)
    processes.start()
    while not processes._running:
        await asyncio.sleep(0.01)
    await processes.stop()
    assert len(tries) == 4 and vital.failure == ""


async def test_a_process_that_hangs_is_ended_by_force() -> None:
    """Or a shard that is stopped when its scheduler gets SIGTERM would keep it for ever."""
    processes = KeptProcesses("sleeper", lambda number: ["/bin/sleep", "600"], 2, VitalParts())
    processes.start()
    while len(processes._running) < 2:
        await asyncio.sleep(0.01)
    hanging = list(processes._running.values())
    async with asyncio.timeout(10):
        await processes.stop(grace_s=0.1)
    assert [process.returncode for process in hanging] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_scheduler_with_a_broken_part_is_not_ready_refuses_and_ends(
    monkeypatch: pytest.MonkeyPatch, is_draining: bool
) -> None:
    found: list[Serving] = []
    seen: list[object] = []

    class Front(InProcessFront):
        async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
            found.append(serving)
            return await super().open(serving, drain)

        def break_off(self) -> None:  # the last moment at which the server answers
            seen.append((self._inference.is_draining, serving_now()))
            super().break_off()

        @property
        def is_idle(self) -> bool:
            return False

    def serving_now() -> bool:
        return found[0].engine.is_closed

    monkeypatch.setattr(server, "InProcessFront", Front)
    with FakeWorker() as worker:
        port = free_port()
        config = SchedulerConfig(worker=(worker.address,), port=port, metrics_port=free_port())
        serving = asyncio.create_task(server.serve(config))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="octavo.v1.Inference"), wait_for_ready=True)
            states = []
            while health_pb2.HealthCheckResponse.SERVING not in states:
                states.append((await watch.read()).status)
            stream = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="say|"))
            worker.delay_s = 0.05
            await stream.read()
            if is_draining:
                await inference_pb2_grpc.ControlStub(channel).Drain(pb.DrainRequest())
            monkeypatch.setattr(Engine, "send_steps", fail)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE, "who waits goes on elsewhere"
            with pytest.raises(ServiceBroken, match="step-loop: KeyError: 'broken'"):
                await asyncio.wait_for(serving, 20)
    assert seen == [(True, True)], "nobody was let in any more"


def test_a_broken_scheduler_ends_with_1_and_the_reason_in_its_last_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def serve(config: SchedulerConfig) -> None:
        raise ServiceBroken("step-loop: KeyError: 'broken'")

    monkeypatch.setattr(server, "serve", serve)
    assert server.main(SchedulerConfig(worker=("127.0.0.1:1",))) == 1
    last = "".join(capfd.readouterr()).splitlines()[-1]
    assert "scheduler has ended" in last and "step-loop: KeyError: 'broken'" in last
