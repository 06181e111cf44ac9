"""The file of a measurement: what was sent, from which machine, every run's figures and requests; and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.load.figures import LoadFigures, Percentiles

SCHEMA = "octavo-load-1"


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError for a file that is none of these, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: no JSON") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not found.get("runs"):
        raise ValueError(f"{path}: not what `octavo bench serve --out` writes")
    return found


def table(rows: Sequence[LoadFigures]) -> str:
    """In Markdown, a row a run; goodput and errors only where there are any."""
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    names = ["load", "requests/s", "tokens/s", "TTFT ms", "between tokens ms", "TPOT ms", "e2e ms", "late ms", "client"]
    has_slo, has_errors = any(row.slo for row in rows), any(row.failed for row in rows)
    names += ["goodput"] if has_slo else []
    names += ["errors"] if has_errors else []
    shown = Table(*names, box=MARKDOWN)
    for row in rows:
        cells = [
            row.load,
            f"{row.requests_per_s:.2f}",
            f"{row.output_tokens_per_s:.1f}",
            *map(_cell, (row.ttft_ms, row.between_tokens_ms, row.tpot_ms, row.e2e_ms, row.late_ms)),
            f"{100 * row.client_cpu_share:.0f} %",
        ]
        if has_slo:
            cells.append(f"{100 * (row.goodput_share or 0):.0f} %, {row.goodput_per_s or 0:.2f}/s")
        if has_errors:
            cells.append(", ".join(f"{count} {kind}" for kind, count in sorted(row.errors.items())) or "-")
        shown.add_row(*cells)
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.strip() for line in capture.get().splitlines() if line.strip())


def _cell(values: Percentiles) -> str:
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values.values())
