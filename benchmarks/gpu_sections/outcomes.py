"""What becomes of each test, a line at a time: a plugin of pytest, and what reads its lines.

    PYTEST_OUTCOMES=/tmp/outcomes.jsonl python -m pytest -p benchmarks.gpu_sections.outcomes ...

pytest's own reports of results are written when it ends, and whoever ends it before has none.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PYTEST_OUTCOMES"  # of the environment: the file
_RANKS = ("begun", "passed", "skipped", "failed")  # a test has three parts: the last of these counts
_MOST_CHARS = 300


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of tests that have begun."""

    counts: Mapping[str, int]  # passed, failed, skipped
    failures: list[str]  # names and why
    unfinished: list[str]


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a line for a part of a test: setup, the test itself, teardown."""
    _write(report, "begun" if report.passed and report.when != "call" else report.outcome)


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is a failure."""
    if report.failed:
        _write(report, report.outcome)


def _write(report: Any, outcome: str) -> None:
    path = os.environ.get(VARIABLE)
    if not path or "PYTEST_XDIST_WORKER" in os.environ:  # whose reports come to the process that started it
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().rpartition("\n")[2]
    line = {"test": report.nodeid, "outcome": outcome, "why": text if outcome == "failed" else ""}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> Outcomes:
    """What a file says; no file is no tests."""
    found: dict[str, tuple[int, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            part = json.loads(line)
        except ValueError:  # the last one, cut short
            continue
        now = _RANKS.index(part["outcome"]), " ".join(part["why"].split())[:_MOST_CHARS]
        found[part["test"]] = max(now, found.get(part["test"], now))
    counts = Counter(_RANKS[rank] for rank, _ in found.values())
    failures = [f"{name}: {why}" for name, (rank, why) in found.items() if _RANKS[rank] == "failed"]
    unfinished = [name for name, (rank, _) in found.items() if _RANKS[rank] == "begun"]
    return Outcomes({outcome: counts[outcome] for outcome in _RANKS[1:]}, failures, unfinished)
