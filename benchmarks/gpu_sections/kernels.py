"""Every operation over its shapes: what `octavo bench kernels` prints, a figure a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from benchmarks.gpu_sections.figure import Figure, Report
from kernels.bench import all_cases
from kernels.bench.case import Case, Setting
from kernels.bench.clock import Clock, GraphClock, HostClock
from kernels.bench.measure import Row, measure

SECTION = "kernels"
_DRY_OPERATIONS = 3


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """`earlier` is not looked at; `is_dry_run`: one tiny shape of a few operations on the CPU."""
    if is_dry_run:
        cases = all_cases.cases(Setting(torch.device("cpu"), torch.float32, is_tiny=True))
        first = {case.op: case for case in reversed([*cases])}  # tests/kernels/test_measure.py runs all of them
        measure_all(itertools.islice(first.values(), _DRY_OPERATIONS), HostClock(), report)
    else:
        setting = Setting(torch.device("cuda"))
        measure_all(all_cases.cases(setting), GraphClock(setting.device), report)


def measure_all(cases: Iterable[Case], clock: Clock, report: Report) -> None:
    """One figure a case, when it is known; one that fails is a figure without a value. Raises the error after which
    the device computes nothing more."""

    def report_failure(text: str) -> None:
        name, _, why = text.partition(": ")
        report(Figure(SECTION, name, None, detail={"error": why}))

    for row in measure(cases, clock, report_failure):
        report(_figure(row))


def _figure(row: Row) -> Figure:
    name = f"{row.op}, {row.shape}"
    return Figure(SECTION, name, row.us, "us", row.goal, row.is_goal_met, detail=row.as_dict())
