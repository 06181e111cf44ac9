"""What reaches clients of one scheduler core: `python -m benchmarks.way_out` (about three minutes, two idle cores).

A simulated worker answers at once, or at a pace that the scheduler keeps up with, in which no two tokens of a stream
share a message. With frontend processes the core and they share what the load leaves them: of two cores, one. Load
averages before each part are kept: beside other work the figures mean little.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from octavo.bench import machine, streaming

RESULTS = Path(__file__).parent / "results"
PARTS: dict[str, dict[str, Any]] = {
    "worker at once": {"streams": [1, 64, 1024]},
    "worker at once, --stream-interval-ms 50": {
        "streams": [1, 64, 1024],
        "scheduler_flags": ["--stream-interval-ms=50"],
    },
    "worker at once, --frontends 2": {"streams": [64, 1024], "frontends": 2},
    "a step every 4 ms": {"streams": [64], "step_ms": 4.0},
    "a step every 55 ms": {"streams": [1024], "step_ms": 55.0},
}


def main() -> int:
    """Prints a table a part; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures what reaches clients.")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    parts: dict[str, Any] = {}
    for name, settings in PARTS.items():
        load = round(os.getloadavg()[0], 2)
        rows = streaming.measure(seconds=arguments.seconds, **settings)
        parts[name] = {**settings, "load_average_before": load, "rows": [row.as_dict() for row in rows]}
        print(f"{name}\n\n{streaming.table(rows)}\n")
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-way-out-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, "parts": parts}, indent=1) + "\n")
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
