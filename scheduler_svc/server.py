"""The scheduler process: starts the parts, listens, says when it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import structlog

from octavo import log as logging
from octavo.rpc import BindError
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.front import Front, InProcessFront
from scheduler_svc.process_front import ProcessFront
from scheduler_svc.serving import Serving
from scheduler_svc.statistics import log_statistics

log = structlog.get_logger()

READINESS_INTERVAL_S = 0.05
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
    front: Front = ProcessFront(config) if config.frontends > 1 else InProcessFront(config)
    serving = Serving(config, front.outputs)
    port = await front.open(serving)
    serving.start()
    log.info("scheduler is listening", host=config.host, port=port, workers=list(config.worker))
    watches = [asyncio.create_task(_follow_readiness(serving, front))]
    if not config.disable_log_stats:
        watches.append(asyncio.create_task(log_statistics(serving.engine)))
    try:
        await _told_to_stop()
    finally:
        log.info("scheduler is stopping")
        for watch in watches:
            watch.cancel()
        await front.drain()
        await asyncio.to_thread(serving.stop)
        await front.close()


async def _follow_readiness(serving: Serving, front: Front) -> None:
    ready, model = False, None
    while True:
        if serving.is_ready != ready or serving.pool.model is not model:
            was_ready, ready, model = ready, serving.is_ready, serving.pool.model
            await front.show(ready, model)
            if ready != was_ready:
                log.info("scheduler is ready" if ready else "scheduler has no worker")
        await asyncio.sleep(READINESS_INTERVAL_S)


async def _told_to_stop() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # where the platform has no signal handlers on loops
            loop.add_signal_handler(number, told.set)
    await told.wait()
