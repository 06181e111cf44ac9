"""Whether the kernels are right on this GPU: their tests, all of them, before any is timed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_sections.figure import Figure, Report

SECTION = "correctness"
_ROOT = Path(__file__).parents[2]
_PROCESSES = 8  # each compiles kernels, which takes longer than running them
_NAMED_FAILURES = 20
_NOT_OF_A_GPU = ("--ignore-glob=*/test_cpu_*", "--ignore=tests/kernels/test_compile_only.py")


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """How many tests passed and were skipped; raises RuntimeError where pytest does not run."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        # The project's own settings name plugins that a machine with a GPU may not have.
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={_ROOT}", "--import-mode=importlib"]
        command += ["-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        if find_spec("xdist") and not is_dry_run:
            command += ["-n", str(min(_PROCESSES, os.cpu_count() or 1))]
        tests = ["tests/kernels/test_reference.py"] if is_dry_run else ["tests/kernels", *_NOT_OF_A_GPU]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([*command, *tests], cwd=_ROOT, env=environment, capture_output=True, text=True)
        if not results.exists():
            raise RuntimeError(f"pytest did not run: {(done.stderr or done.stdout).strip()[-500:]}")
        counts, failures = read_results(results)
    detail = {**counts, "failures": failures[:_NAMED_FAILURES]}
    report(
        Figure(SECTION, "kernel tests passed", counts["passed"], goal="all", is_goal_met=not failures, detail=detail)
    )
    report(Figure(SECTION, "kernel tests skipped", counts["skipped"], detail={}))


def read_results(path: Path) -> tuple[dict[str, int], list[str]]:
    """How many tests of a JUnit file passed, failed and were skipped, and the names of those that failed."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in xml.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failures
