"""The tables and the picture of autoscaling in docs/scaling.md, out of the newest results that are kept.

Nothing is measured here. `python -m docs.generate` writes what these functions return into the page; a test compares.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.figures_page import markdown_table, newest
from octavo.bench import picture
from octavo.bench.autoscaling.judged import Judged
from octavo.bench.autoscaling.shown import charts

SHOWN_START_S = 120.0


def blocks() -> dict[str, str]:
    """Markdown by the name of the place where it stands."""
    found = newest("autoscaling")
    return {f"autoscaling-{day}": _table(rows) for day, rows in found["days"].items()}


def draw(folder: Path) -> None:
    """Writes the chat day under the shipped rule, the first one and the plan of someone who knew."""
    rows = newest("autoscaling")["days"]["chat"]
    shown = [_of(rows, name) for name in ("shipped", "first rule", "ideal")]
    picture.write(folder / "autoscaling.svg", charts(shown))


def _of(rows: dict[str, Any], name: str) -> Judged:
    row = rows[f"{name}, {SHOWN_START_S:.0f} s"]
    return Judged(**{field.name: row[field.name] for field in fields(Judged)})


def _table(rows: dict[str, Any]) -> str:
    """A row a rule and start. The fixed pool is there from the beginning, so its start does not matter."""
    cells = []
    for key, row in sorted(rows.items(), key=lambda each: (each[1]["start_s"], _ORDER.index(_rule(each[0])))):
        name, ideal = _rule(key), rows.get(f"ideal, {row['start_s']:.0f} s")
        shown = row["name"] if name in ("ideal", "fixed") else name
        cells.append(
            [
                f"{row['start_s']:.0f} s",
                shown,
                f"{row['good']:.2%}",
                f"{row['worst_hour']:.0%}",
                f"{row['ttft_p99_s']:.1f} s",
                f"{row['worker_hours']:.1f}",
                f"{row['worker_hours'] / ideal['worker_hours']:.2f}" if ideal else "-",
                f"{row['most_workers']}",
                f"{row['changes']} / {row['turns']}",
            ]
        )
    headers = ["start", "", "within the objective", "worst hour", "first token p99", "worker-hours", "times the ideal"]
    return markdown_table([*headers, "most workers", "changes / turns"], cells).replace("|  |", "| |")


_ORDER = (
    "shipped",
    "first rule",
    "requests alone",
    "waiting tokens alone",
    "cache use alone",
    "CPU alone",
    "fixed",
    "ideal",
)


def _rule(key: str) -> str:
    return key.rpartition(", ")[0]
