"""Fuzzes a scheduler and a worker while a good client streams: `python -m tests.fuzz --cases 10000`.

Says how the good client fared, what each process grew by, and every fault with the number that brings its case again
(`--seed S --first N --cases 1`). Exit code 1 where there was one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import bench, make_model

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--logs", type=Path, help="folder to keep the services' logs in")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="further options of the scheduler, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with bench(make_model(Path(folder) / "model"), logs, *given.options) as fuzzed:
            started = time.monotonic()
            for first in range(given.first, given.first + given.cases, BATCH):
                fuzzed.run(given.seed, first, min(BATCH, given.first + given.cases - first))
                taken, memory = time.monotonic() - started, _in_mib(fuzzed.resident_bytes())
                print(f"{first + BATCH - given.first} cases, {taken:.0f} s; {memory}", file=sys.stderr)
            report = fuzzed.report()
    print(f"{report.num_cases} cases: {report.statuses}")
    print(f"neighbour: {report.neighbour}")
    print(f"memory since the first {BATCH}: {_in_mib(report.grown_bytes)}")
    for fault in report.faults:
        print(f"FAULT {fault}")
    return 1 if report.faults else 0


def _in_mib(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items())


if __name__ == "__main__":
    sys.exit(main())
