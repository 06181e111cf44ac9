"""Days of pools as a table and as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.autoscaling.judged import WINDOW_S, Judged
from octavo.bench.picture import Chart, Series

HEADERS = (
    "",
    "within the objective",
    "worst hour",
    "first token p50 / p99",
    "between tokens p99",
    "worker-hours",
    "most workers",
    "changes / turns",
)


def cells(row: Judged) -> tuple[str, ...]:
    """One for each of the headers."""
    return (
        row.name,
        f"{row.good:.1%}" + ("" if row.is_kept else " (missed)"),
        f"{row.worst_hour:.0%}",
        f"{row.ttft_p50_s:.1f} / {row.ttft_p99_s:.1f} s",
        f"{row.between_tokens_p99_ms:.0f} ms",
        f"{row.worker_hours:.1f}",
        f"{row.most_workers}",
        f"{row.changes} / {row.turns}",
    )


def table(rows: Sequence[Judged]) -> str:
    """Markdown, a row a pool."""
    lines = [HEADERS, ["---"] * len(HEADERS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def charts(rows: Sequence[Judged]) -> list[Chart]:
    """The day from left to right: what arrived, how many workers there were, and what the slowest waited for."""
    hours = [place * WINDOW_S / 3600 for place in range(len(rows[0].windows))]

    def of(row: Judged, key: str) -> list[float]:
        return [window[key] for window in row.windows]

    return [
        Chart("what arrives", "hour", "requests/s", [Series("arrivals", hours, of(rows[0], "arrivals_per_s"))]),
        Chart("workers", "hour", "pods, those that start among them",
              [Series(row.name, hours, of(row, "workers")) for row in rows]),
        Chart("time to the first token", "hour", "p99 of 5 minutes, s",
              [Series(row.name, hours, of(row, "ttft_p99_s")) for row in rows]),
    ]  # fmt: skip
