"""What a step costs the scheduler, and how that grows: `python -m benchmarks.step_costs`.

`octavo bench steps` over numbers of sequences, of workers, of requests that wait, and of cached blocks. One core is
enough; the figures are medians of `--rounds` runs of each point, which take turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from octavo.bench import machine, steps

RESULTS = Path(__file__).parent / "results"
POINTS: list[dict[str, int]] = [
    *({"sequences": count} for count in (1, 16, 64, 256, 1024)),
    *({"sequences": 256, "waiting": count} for count in (1_000, 100_000)),
    *({"sequences": 256, "cached_blocks": count} for count in (10_000, 1_000_000)),
    *({"sequences": 1024, "workers": count} for count in (4, 16, 64)),
]


def main() -> int:
    """Prints medians by point; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures what a step costs the scheduler.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    rounds = [[steps.measure(**point).as_dict() for point in POINTS] for _ in range(arguments.rounds)]
    rows = [_median(same) for same in zip(*rounds, strict=True)]
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-steps-{machine.slug(facts)}.json"
        facts = {"date": date, "machine": facts, "rounds": len(rounds), "rows": rows}
        path.write_text(json.dumps(facts, indent=1) + "\n")
    print("| sequences | workers | waiting | cached blocks | schedule | encode | decode | process | total |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        us = row["us_per_step"]
        print(
            f"| {row['sequences']:,} | {row['workers']} | {row['waiting']:,} | {row['cached_blocks']:,} | "
            + " | ".join(f"{us[name]:.0f} µs" for name in (*steps.PHASES, "total"))
            + " |"
        )
    return 0


def _median(same: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The run whose total is in the middle."""
    middle = statistics.median_low([row["us_per_step"]["total"] for row in same])
    return next(row for row in same if row["us_per_step"]["total"] == middle)


if __name__ == "__main__":
    sys.exit(main())
