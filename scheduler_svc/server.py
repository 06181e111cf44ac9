"""The scheduler process: starts the parts, listens, says when it is ready, and ends in order."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import replace

import structlog

from octavo.shared import log as logging
from octavo.shared.access.exposure import check_exposure
from octavo.shared.access.tls import server_tls
from octavo.shared.options import OptionError
from octavo.shared.tracing.options import check_tracing_packages
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.metrics_exporter import EngineCollector
from scheduler_svc.api.metrics_server import serve_metrics
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.statistics import log_statistics
from scheduler_svc.frontends.front import Front, InProcessFront
from scheduler_svc.frontends.process_front import ProcessFront
from scheduler_svc.frontends.readiness import READINESS_INTERVAL_S, follow_readiness
from scheduler_svc.serving import SWITCH_INTERVAL_S, Serving
from scheduler_svc.stopping import Stopping
from scheduler_svc.text.tokenizer import TokenizerError
from scheduler_svc.vital_parts import ServiceBroken

log = structlog.get_logger()

BROKEN_END_S = 10.0  # that a scheduler with a broken part has to end in order


def main(config: SchedulerConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code: 1 where a part broke that it needs, told in the last line.

    Raises OptionError, BindError.
    """
    if not config.worker:
        raise OptionError("no --worker is given: HOST:PORT or dns:///NAME:PORT")
    logging.configure(config.log_level)
    is_locked = config.knows_callers or config.tls_client_ca_file is not None
    has_tls = config.tls_cert_file is not None  # alone it keeps nobody away, which is said once
    locks = "--keys-file, --jwt-jwks-url and --tls-client-ca-file"
    check_exposure(config.host, is_locked=is_locked, insecure=config.insecure or has_tls, locks=locks)
    if config.log_prompts:
        log.warning("PROMPTS AND ANSWERS OF ALL REQUESTS ARE WRITTEN TO THIS LOG", option="--log-prompts")
    Authority.of(config)  # here, as frontends could only end over them, one after the other
    server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    if config.otlp_traces_endpoint:
        check_tracing_packages()  # likewise
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        if config.shards > 1:
            from scheduler_svc.shards import sharded_server

            asyncio.run(sharded_server.serve(config))
        else:
            next_config: SchedulerConfig | None = config
            while next_config is not None:
                next_config = asyncio.run(serve(next_config))
    except ServiceBroken as error:
        log.critical("scheduler has ended", why=str(error))
        return 1
    return 0


async def serve(config: SchedulerConfig) -> SchedulerConfig | None:
    """Runs the service in the current event loop until it is told to stop, or has handed its last worker over.

    In the second case gives the options with which it is to stand by from now on, empty as at its first start.
    Raises OptionError, BindError, and ServiceBroken when a part has ended that it cannot live without.
    """
    front: Front = ProcessFront(config) if config.frontends > 1 else InProcessFront(config)
    try:
        serving = Serving(config, front.outputs)
    except TokenizerError as error:
        raise OptionError(f"--tokenizer: {error}") from None
    stopping = Stopping()
    # First, as a front that is open has to be closed.
    metrics = serve_metrics(EngineCollector(serving.engine), config, serving.vital)
    port = await front.open(serving, stopping.drain)
    serving.start()
    stopping.listen()
    log.info("scheduler is listening", host=config.host, port=port, workers=list(config.worker))
    told = asyncio.create_task(stopping.told())
    readiness = asyncio.create_task(follow_readiness(serving, front))
    broken = asyncio.create_task(serving.vital.broken())
    watches = [told, readiness, broken]
    watches.append(asyncio.create_task(_follow_handover(serving, stopping)))
    if not config.disable_log_stats:
        watches.append(asyncio.create_task(log_statistics(serving.engine)))
    try:
        await asyncio.wait([told, readiness, broken], return_when=asyncio.FIRST_COMPLETED)
        if readiness.done():
            readiness.result()  # raises: nobody would be told of a worker any more
        if broken.done():
            await front.drain()  # not ready, and nobody is let in
            await broken  # raises
        log.info("scheduler is draining", requests=serving.engine.num_live)
        await front.drain()
        await _drained(front, stopping, serving, config.drain_timeout)
        if serving.vital.failure:
            await broken
    finally:
        log.info("scheduler is stopping")
        anyway = threading.Timer(BROKEN_END_S, _end_by_force)
        anyway.daemon = True
        serving.vital.on_failure(anyway.start)  # what is broken may keep the rest from ending
        for watch in watches:
            watch.cancel()
        serving.engine.close()  # before those who wait are sent away: who comes now is, too, and not aborted
        front.break_off()
        ending = [serving.stop] if metrics is None else [serving.stop, metrics.stop]
        await asyncio.gather(*map(asyncio.to_thread, ending))
        await front.close()
        anyway.cancel()
    is_over = stopping.is_signalled or not serving.pool.hands_over.is_set()
    return None if is_over else replace(config, port=port)


async def _follow_handover(serving: Serving, stopping: Stopping) -> None:
    """Another scheduler wants the last worker: requests finish here, or go on there with what they have."""
    while not serving.pool.hands_over.is_set():
        await asyncio.sleep(READINESS_INTERVAL_S)
    stopping.drain()


async def _drained(front: Front, stopping: Stopping, serving: Serving, seconds: float) -> None:
    """Returns when nobody waits for an answer any more, or would in vain, and after `seconds` anyway."""
    deadline_s = time.monotonic() + seconds
    while not (front.is_idle or stopping.is_urgent or serving.vital.failure) and time.monotonic() < deadline_s:
        await stopping.wait_no_longer(READINESS_INTERVAL_S)


def _end_by_force() -> None:
    log.critical("ending by force", after_s=BROKEN_END_S)
    os._exit(1)
