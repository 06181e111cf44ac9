"""Shows what faults cost when the tests are over, and writes it down where `--chaos-results` asks for it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from benchmarks import machine
from tests.chaos import recovery_times


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = recovery_times.summary(recovery_times.RECOVERIES)
    if not rows:
        return
    terminalreporter.section("from a fault to the next token")
    for line in recovery_times.table(rows):
        terminalreporter.write_line(line)
    if path := config.getoption("--chaos-results"):
        results = {
            "date": datetime.date.today().isoformat(),
            "machine": machine.describe(),
            "from_fault_to_next_token": rows,
        }
        Path(path).write_text(json.dumps(results, indent=2) + "\n")
