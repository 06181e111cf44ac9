"""What a run of a workload says: tokens a second, times to the first token and between tokens; numbers and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.outputs import RequestMetrics


@dataclass(frozen=True)
class Figures:
    """Medians and 99th percentiles are over requests (first token) and over gaps between deliveries of one request."""

    workload: str
    over: str  # what was measured: "LLM", "Generate", another engine's name
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    ready_s: float = math.nan  # from the start of the engine, weights included, to the moment it takes requests
    worker_peak_gib: float = math.nan  # of the process that computes
    streams: int | None = None  # that ran at once, where a number was given

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not measured is null."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def measure(
    workload: str, over: str, prompt_tokens: int, output_tokens: int, wall_ns: int, metrics: Sequence[RequestMetrics]
) -> Figures:
    """Figures of one run; without `metrics` (an engine that does not stream) times of tokens are NaN."""
    first_ms = [(m.first_token_ns - m.arrival_ns) / 1e6 for m in metrics if m.first_token_ns is not None]
    gaps_ms = [
        (later - earlier) / 1e6
        for m in metrics
        for earlier, later in zip(m.token_times_ns, m.token_times_ns[1:], strict=False)
    ]
    return Figures(
        workload=workload,
        over=over,
        num_requests=len(metrics),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wall_s=wall_ns / 1e9,
        output_tokens_per_s=output_tokens / (wall_ns / 1e9),
        first_token_p50_ms=percentile(first_ms, 50),
        first_token_p99_ms=percentile(first_ms, 99),
        between_tokens_p50_ms=percentile(gaps_ms, 50),
        between_tokens_p99_ms=percentile(gaps_ms, 99),
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


_HEADERS = ("workload", "over", "tokens/s", "first token p50 / p99", "between tokens p50 / p99", "wall")


def table(rows: Sequence[Figures]) -> str:
    """A Markdown table, a row a run."""
    cells = [_HEADERS, tuple("---" for _ in _HEADERS), *map(_cells, rows)]
    if any(row.streams is not None for row in rows):
        streams = ["streams", "---", *("-" if row.streams is None else str(row.streams) for row in rows)]
        cells = [(*row[:2], each, *row[2:]) for row, each in zip(cells, streams, strict=True)]
    if not all(math.isnan(row.ready_s) for row in rows):
        ends = [("ready", "worker's memory"), ("---", "---"), *map(_start_cells, rows)]
        cells = [left + right for left, right in zip(cells, ends, strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _cells(row: Figures) -> tuple[str, ...]:
    return (
        row.workload,
        row.over,
        f"{row.output_tokens_per_s:.1f}",
        _pair(row.first_token_p50_ms, row.first_token_p99_ms),
        _pair(row.between_tokens_p50_ms, row.between_tokens_p99_ms),
        f"{row.wall_s:.2f} s",
    )


def _start_cells(row: Figures) -> tuple[str, ...]:
    return f"{row.ready_s:.1f} s", f"{row.worker_peak_gib:.2f} GiB"


def _pair(p50_ms: float, p99_ms: float) -> str:
    return "-" if math.isnan(p50_ms) else f"{p50_ms:.0f} / {p99_ms:.0f} ms"
