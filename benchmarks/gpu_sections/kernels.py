"""Every operation over its shapes: what `octavo bench kernels` prints, a figure a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu_sections.figure import Figure, Report
from kernels.bench import all_cases
from kernels.bench.case import Setting
from kernels.bench.clock import Clock, GraphClock, HostClock
from kernels.bench.measure import Row, measure

SECTION = "kernels"


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """`earlier` is not looked at; `is_dry_run`: tiny shapes on the CPU."""
    if is_dry_run:
        measure_all(Setting(torch.device("cpu"), torch.float32, is_tiny=True), HostClock(), report)
    else:
        setting = Setting(torch.device("cuda"))
        measure_all(setting, GraphClock(setting.device), report)


def measure_all(setting: Setting, clock: Clock, report: Report) -> None:
    """One figure a case; one that fails is a figure without a value."""
    failures: list[str] = []
    for row in measure(all_cases.cases(setting), clock, failures.append):
        report(_figure(row))
        for failure in failures:
            name, _, why = failure.partition(": ")
            report(Figure(SECTION, name, None, detail={"error": why}))
        failures.clear()


def _figure(row: Row) -> Figure:
    name = f"{row.op}, {row.shape}"
    return Figure(SECTION, name, row.us, "us", row.goal, row.is_goal_met, detail=row.as_dict())
