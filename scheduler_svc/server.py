"""The scheduler process: starts the parts, listens, says when it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import structlog

from octavo import log as logging
from octavo.rpc import BindError, Health, add_introspection, bind
from protos import inference_pb2_grpc
from scheduler_svc import inference_service
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.control_service import ControlService
from scheduler_svc.grpc_server import new_server
from scheduler_svc.inference_service import EngineCore, InferenceService
from scheduler_svc.mailboxes import Mailboxes
from scheduler_svc.serving import Serving
from scheduler_svc.statistics import log_statistics

log = structlog.get_logger()

SERVICES = ("octavo.v1.Inference", "octavo.v1.Control")
READINESS_INTERVAL_S = 0.05
GRACE_S = 1.0  # for streams to read their last message
SWITCH_INTERVAL_S = 0.0005  # a thread that waits for the interpreter beside a busy one waits this long, not 5 ms


def main(config: SchedulerConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the process's exit code."""
    logging.configure(config.log_level)
    if not config.worker:
        log.error("cannot start", why="no --worker is given: HOST:PORT or dns:///NAME:PORT")
        return 2
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(serve(config))
    except BindError as error:
        log.error("cannot start", why=str(error))
        return 1
    return 0


async def serve(config: SchedulerConfig) -> None:
    """Runs the service in the current event loop until it is told to stop."""
    mailboxes = Mailboxes(asyncio.get_running_loop(), config.stream_interval_ms / 1e3)
    serving = Serving(config, mailboxes)
    inference = InferenceService(serving.frontend, EngineCore(serving.engine), mailboxes)
    server = new_server(config)
    inference_service.add_to_server(inference, server)
    inference_pb2_grpc.add_ControlServicer_to_server(ControlService(serving, config), server)
    health = add_introspection(server, SERVICES)
    port = bind(server, config.host, config.port)
    serving.start()
    await server.start()
    log.info("scheduler is listening", host=config.host, port=port, workers=list(config.worker))
    watches = [asyncio.create_task(_follow_readiness(serving, inference, health))]
    if not config.disable_log_stats:
        watches.append(asyncio.create_task(log_statistics(serving.engine)))
    try:
        await _told_to_stop()
    finally:
        log.info("scheduler is stopping")
        inference.is_draining = True
        await health.set_ready(False)
        for watch in watches:
            watch.cancel()
        await asyncio.to_thread(serving.stop)
        await health.shut_down()
        await server.stop(GRACE_S)


async def _follow_readiness(serving: Serving, inference: InferenceService, health: Health) -> None:
    ready = False
    while True:
        if serving.is_ready != ready and not inference.is_draining:
            ready = not ready
            await health.set_ready(ready)
            log.info("scheduler is ready" if ready else "scheduler has no worker")
        await asyncio.sleep(READINESS_INTERVAL_S)


async def _told_to_stop() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # where the platform has no signal handlers on loops
            loop.add_signal_handler(number, told.set)
    await told.wait()
