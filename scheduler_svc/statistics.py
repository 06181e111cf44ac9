"""The log line every few seconds: throughput, queues and cache usage, read from the step loop's own counters."""

from __future__ import annotations

import asyncio
import time

import structlog

from scheduler_svc.engine import Engine
from scheduler_svc.load import Load

log = structlog.get_logger()

INTERVAL_S = 5.0


async def log_statistics(engine: Engine) -> None:
    """Logs one line an interval in which anything ran or waits, until cancelled."""
    metrics = engine.metrics
    last_prefilled, last_generated, last_ns = 0, 0, time.monotonic_ns()
    while True:
        await asyncio.sleep(INTERVAL_S)
        prefilled, generated = metrics.num_prefill_tokens, metrics.num_generation_tokens
        load, now_ns = Load.of(engine), time.monotonic_ns()
        if prefilled != last_prefilled or generated != last_generated or load.num_running or load.num_pending:
            seconds = (now_ns - last_ns) / 1e9
            log.info(
                "throughput",
                prompt_tokens_per_s=round((prefilled - last_prefilled) / seconds, 1),
                generation_tokens_per_s=round((generated - last_generated) / seconds, 1),
                running=load.num_running,
                swapped=load.num_swapped,
                pending=load.num_pending,
                gpu_cache_usage_percent=round(100 * load.device_usage, 1),
                cpu_cache_usage_percent=round(100 * load.host_usage, 1),
                workers=load.num_workers,
            )
        last_prefilled, last_generated, last_ns = prefilled, generated, now_ns
