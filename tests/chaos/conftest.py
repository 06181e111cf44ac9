"""The cluster that tests break, and what that cost: shown at the end, and written down for `--chaos-results`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench import machine
from tests.chaos import recovery_times, throughputs
from tests.chaos.cluster import Cluster
from tests.tiny_models import make_tiny_llama

WORKER_OPTIONS = (
    "--max-model-len=320",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=64",  # less than a prompt: chunks
    "--kv-cache-memory=0.0003",  # less than what 16 requests grow to: swaps
    "--swap-space=0.005",
)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, logs = make_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs")
    options = ("--preemption-mode=swap",)
    with Cluster(folder, logs, num_spares=1, worker_options=WORKER_OPTIONS, scheduler_options=options) as cluster:
        yield cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tables = {
        "from a fault to the next token": recovery_times.summary(recovery_times.RECOVERIES),
        "throughput over a slow network": throughputs.summary(throughputs.THROUGHPUTS),
    }
    tables = {title: rows for title, rows in tables.items() if rows}
    for title, rows in tables.items():
        terminalreporter.section(title)
        for line in table(rows):
            terminalreporter.write_line(line)
    if tables and (path := config.getoption("--chaos-results")):
        results = {"date": datetime.date.today().isoformat(), "machine": machine.describe(), **tables}
        Path(path).write_text(json.dumps(results, indent=2) + "\n")


def table(rows: list[recovery_times.Row]) -> list[str]:
    """Lines with the keys of the rows, which are the same in all of them, on top."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
