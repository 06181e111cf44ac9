"""The log line every few seconds: throughput, queues and cache usage, read from the step loop's own counters."""

from __future__ import annotations

import asyncio
import time

import structlog

from scheduler_svc.engine import Engine

log = structlog.get_logger()

INTERVAL_S = 5.0


async def log_statistics(engine: Engine) -> None:
    """Logs one line an interval in which anything ran or waits, until cancelled."""
    last_tokens, last_drawn, last_ns = 0, 0, time.monotonic_ns()
    while True:
        await asyncio.sleep(INTERVAL_S)
        workers, now_ns = list(engine.workers), time.monotonic_ns()
        tokens = sum(worker.statistics.num_tokens for worker in workers)
        drawn = sum(worker.statistics.num_drawn for worker in workers)
        running = sum(worker.num_running for worker in workers)
        if tokens != last_tokens or running or engine.live.num_waiting:
            seconds = (now_ns - last_ns) / 1e9
            blocks = sum(worker.sizes.num_device_blocks for worker in workers)
            free = sum(worker.scheduler.blocks.num_free_blocks for worker in workers)
            log.info(
                "throughput",
                computed_tokens_per_s=round(max(0, tokens - last_tokens) / seconds, 1),
                generated_tokens_per_s=round(max(0, drawn - last_drawn) / seconds, 1),
                running=running,
                preempted=sum(len(worker.scheduler.preempted) for worker in workers),
                waiting=engine.live.num_waiting,
                workers=len(workers),
                cache_usage_percent=round(100 * (blocks - free) / blocks, 1) if blocks else 0.0,
            )
        last_tokens, last_drawn, last_ns = tokens, drawn, now_ns
