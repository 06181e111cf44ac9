"""The log line every few seconds: throughput, queues and cache usage, read from the step loop's own counters."""

from __future__ import annotations

import asyncio
import threading
import time

import structlog

from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.load import Load

log = structlog.get_logger()

INTERVAL_S = 5.0


class StatisticsLine:
    """Says what has happened since it was made or called last, unless nothing ran or waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._metrics = engine, engine.metrics
        self._num_prefilled = self._num_generated = 0
        self._last_ns = time.monotonic_ns()

    @property
    def is_due(self) -> bool:
        """For a caller without a clock of his own."""
        return time.monotonic_ns() - self._last_ns >= INTERVAL_S * 1e9

    def log(self) -> None:
        """Logs the line; speeds are those since the last call."""
        metrics = self._metrics.total()
        prefilled, generated = metrics.num_prefill_tokens, metrics.num_generation_tokens
        load, now_ns = Load.of(self._engine), time.monotonic_ns()
        if (prefilled, generated) != (self._num_prefilled, self._num_generated) or load.num_running or load.num_pending:
            seconds = (now_ns - self._last_ns) / 1e9
            log.info(
                "throughput",
                prompt_tokens_per_s=round((prefilled - self._num_prefilled) / seconds, 1),
                generation_tokens_per_s=round((generated - self._num_generated) / seconds, 1),
                running=load.num_running,
                swapped=load.num_swapped,
                pending=load.num_pending,
                gpu_cache_usage_percent=round(100 * load.device_usage, 1),
                cpu_cache_usage_percent=round(100 * load.host_usage, 1),
                workers=load.num_workers,
                **_by_model(self._engine),
            )
        self._num_prefilled, self._num_generated, self._last_ns = prefilled, generated, now_ns


def _by_model(engine: Engine) -> dict[str, str]:
    """Running and waiting requests of each model, where there are several."""
    loads = Load.by_model(engine)
    if len(loads) < 2:
        return {}
    return {"models": ", ".join(f"{name}: {load.num_running}+{load.num_pending}" for name, load in loads.items())}


async def log_statistics(engine: Engine) -> None:
    """Logs one line an interval in which anything ran or waits, until cancelled."""
    line = StatisticsLine(engine)
    while True:
        await asyncio.sleep(INTERVAL_S)
        line.log()


def log_statistics_until(ended: threading.Event, engine: Engine) -> None:
    """The same on a thread, for a process without an event loop."""
    line = StatisticsLine(engine)
    while not ended.wait(INTERVAL_S):
        line.log()
