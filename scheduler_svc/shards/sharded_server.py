"""The parent of a scheduler that runs in shards. It sees no prompt and no token.

It starts shards and frontends, answers `Control` for all of them, keeps the request ids, reports metrics, and ends
everything in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import grpc
import structlog

from octavo.shared.options import to_arguments
from octavo.shared.ports import reserve_port
from octavo.shared.processes.module_command import module_command
from octavo.shared.rpc import WORKER_SERVER_OPTIONS
from protos import inference_pb2_grpc, shards_pb2, shards_pb2_grpc
from scheduler_svc.api.control_server import ControlServer, serve_control
from scheduler_svc.api.metrics_server import serve_metrics
from scheduler_svc.api.public_server import GRACE_S
from scheduler_svc.api.request_guard import RequestGuard
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontends.kept_processes import KeptProcesses
from scheduler_svc.frontends.readiness import READINESS_INTERVAL_S
from scheduler_svc.shards.front_service import FrontService
from scheduler_svc.shards.sharded_control import ShardedControl
from scheduler_svc.shards.sharded_metrics import ShardedCollector, Texts
from scheduler_svc.shards.shards import LiveShard, Shards
from scheduler_svc.stopping import Stopping
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

METRICS_TIMEOUT_S = 2.0
HELD = "octavo:num_requests_held"


async def serve(config: SchedulerConfig) -> None:
    """Runs the service in the current event loop until it is told to stop.

    Raises BindError, and ServiceBroken when a part has ended that it cannot live without.
    """
    parent = Parent(config)
    stopping = Stopping()
    metrics = serve_metrics(ShardedCollector(asyncio.get_running_loop(), parent.read_metrics), config, parent.vital)
    try:
        port = await parent.open(stopping)
        stopping.listen()
        workers = list(config.worker)
        log.info("scheduler is listening", host=config.host, port=port, workers=workers, shards=config.shards)
        told, broken = asyncio.create_task(stopping.told()), asyncio.create_task(parent.vital.broken())
        try:
            await asyncio.wait([told, broken], return_when=asyncio.FIRST_COMPLETED)
            parent.drain()
            log.info("scheduler is draining", requests=len(parent.front.ids))
            deadline_s = time.monotonic() + config.drain_timeout
            while not (parent.is_idle or stopping.is_urgent or broken.done()) and time.monotonic() < deadline_s:
                await stopping.wait_no_longer(READINESS_INTERVAL_S)
            if broken.done():
                await broken  # raises
        finally:
            log.info("scheduler is stopping")
            told.cancel()
            broken.cancel()
            await parent.close()
    finally:
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)


class Parent:
    """Sockets and tokenizer files lie in a folder that nobody but this user can enter."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.vital = VitalParts()
        self.front = FrontService(config.tenants())
        self._config = config
        self._state = shards_pb2.FrontState()
        self._files = tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True)
        self._folder = Path(self._files.name)
        self._shards = Shards(config, self._folder, self.vital, self._on_change)
        self._server = grpc.aio.server(options=WORKER_SERVER_OPTIONS, interceptors=(RequestGuard(),))
        self._frontends: KeptProcesses | None = None
        self._reserved: socket.socket | None = None  # keeps the port while no frontend listens
        self._was_ready = False
        self._control: ControlServer | None = None

    async def open(self, stopping: Stopping) -> int:
        """Starts everything, and returns the port. Raises BindError."""
        config = self._config
        self._reserved, port = reserve_port(config.host, config.port)
        address = f"unix:{self._folder}/front"
        control = ShardedControl(self._shards, self.front.ids, config, stopping.drain)
        shards_pb2_grpc.add_FrontServicer_to_server(self.front, self._server)
        inference_pb2_grpc.add_ControlServicer_to_server(control, self._server)
        self._server.add_insecure_port(address)
        await self._server.start()
        self._control = await serve_control(config, partial(inference_pb2_grpc.add_ControlServicer_to_server, control))
        self._shards.start()
        options = to_arguments(dataclasses.replace(config, port=port))
        command = module_command("scheduler_svc.frontend_process", f"--core={address}", *options)
        self._frontends = KeptProcesses(
            "frontend", lambda number: [*command, f"--number={number}"], config.frontends, self.vital
        )
        self._frontends.start()
        return port

    def drain(self) -> None:
        """No new requests, and not ready, from now on and for good."""
        self._state.is_draining = True
        self.front.set_state(self._state)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer; of interest while it drains."""
        return not len(self.front.ids)

    async def close(self) -> None:
        """Sends those who still wait to another scheduler, and ends frontends, then shards."""
        self._state.is_broken_off = not self.is_idle
        self.front.set_state(self._state)
        self.front.close()
        if self._frontends is not None:
            await self._frontends.stop()
        await self._shards.stop()
        if self._control is not None:
            await self._control.close()
        await self._server.stop(GRACE_S)
        if self._reserved is not None:
            self._reserved.close()
        self._files.cleanup()

    async def read_metrics(self) -> Texts:
        """What each shard tells, by its index and life, and this process; those that do not answer are left out."""
        lives = list(self._shards.live.values())
        answers = await asyncio.gather(*map(_metrics_of, lives), return_exceptions=True)
        texts = {
            (live.index, live.socket): answer
            for live, answer in zip(lives, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        # No shard knows of those that wait here.
        return texts | {(-1, "parent"): f"# TYPE {HELD} gauge\n{HELD} {self.front.num_held}\n# EOF\n"}

    def _on_change(self) -> None:
        """Frontends hear which shards there are, and the log whether there is a worker."""
        shards = [shards_pb2.ShardAddress(index=live.index, socket=live.socket) for live in self._shards.live.values()]
        if shards != list(self._state.shards):
            del self._state.shards[:]
            self._state.shards.extend(shards)
            self.front.set_state(self._state)
        is_ready = any(live.status.is_ready for live in self._shards.live.values())
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            log.info("scheduler is ready" if is_ready else "scheduler has no worker")


async def _metrics_of(live: LiveShard) -> str:
    answer: shards_pb2.MetricsText = await live.shard.GetMetrics(
        shards_pb2.GetMetricsRequest(), timeout=METRICS_TIMEOUT_S
    )
    return answer.text.decode()
