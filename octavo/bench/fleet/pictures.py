"""Sizes of pools as a picture: throughput beside one worker's, and times to the first token."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.fleet.figures import FleetFigures
from octavo.bench.picture import Chart, Series


def sizes_of_pool(rows: Sequence[FleetFigures]) -> list[Chart]:
    """Throughput, with the line on which every worker adds as much as one of the smallest pool, and first tokens."""
    rows = sorted(rows, key=lambda row: row.workers)
    workers = [row.workers for row in rows]
    smallest = rows[0].tokens_per_s / rows[0].workers
    is_log = workers[0] < workers[-1]
    speed = Chart(
        "throughput",
        "workers",
        "output tokens/s",
        [
            Series("measured", workers, [row.tokens_per_s for row in rows]),
            Series("in proportion to workers", workers, [smallest * count for count in workers]),
        ],
        log_x=is_log,
    )
    waits = Chart(
        "time to the first token",
        "workers",
        "ms",
        [
            Series("median", workers, [row.ttft_p50_ms for row in rows]),
            Series("99th percentile", workers, [row.ttft_p99_ms for row in rows]),
        ],
        log_x=is_log,
    )
    return [speed, waits]
