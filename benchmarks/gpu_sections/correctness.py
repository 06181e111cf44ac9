"""Whether kernels and a worker's way through them are right on this GPU: their tests, before anything is timed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from benchmarks.gpu_sections import outcomes
from benchmarks.gpu_sections.figure import Figure, Report

SECTION = "correctness"
_ROOT = Path(__file__).parents[2]
_PROCESSES = 12  # each compiles kernels, which takes longer than running them
_NAMED_FAILURES = 20
_LIMIT_S = 90.0  # less than the section has, so that what was found by then is reported
# Of a worker's tests those that use the GPU.
OF_A_WORKER = (
    "tests/worker/test_gpu_path.py",
    "tests/worker/test_gpu_families.py",
    "tests/worker/test_gpu_quantised.py",
    "tests/worker/test_gpu_streams.py",
    "tests/worker/test_gpt_oss.py::test_replayed_steps_draw_the_tokens_of_transformers",
    "tests/worker/test_latent_models.py::test_greedy_tokens_on_the_kernels_of_a_gpu",
    "tests/worker/test_mixed_graphs.py::test_a_replayed_step_gives_the_bits_of_the_step_itself",
    "tests/worker/test_sampling_graphs.py::test_on_the_kernels_of_a_gpu",
)
# Of the kernels' those that do not, and take time: they compile the CPU's library. Besides, those named after the CPU.
ON_A_CPU = (
    "int4_linear",
    "int8_linear",
    "layer_stack",
    "layer_workspace",
    "other_processors",
    "shared_attention",
    "shared_work",
    "tile_products",
)
_NOT_OF_A_GPU = [f"--ignore=tests/kernels/test_{name}.py" for name in (*ON_A_CPU, "compile_only")]


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """How many tests passed and were skipped; raises RuntimeError where pytest does not run."""
    if is_dry_run:
        run_tests(report, ["tests/kernels/test_reference.py"])
    else:
        run_tests(report, ["tests/kernels", *OF_A_WORKER, "--ignore-glob=*/test_cpu_*", *_NOT_OF_A_GPU], _PROCESSES)


def run_tests(report: Report, tests: Sequence[str], num_processes: int = 1, limit_s: float = _LIMIT_S) -> None:
    """As `run`, of files of tests; those that are over after `limit_s` count, and the goal is missed."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        path = Path(folder) / "outcomes.jsonl"
        # The project's own settings name plugins that a machine with a GPU may not have.
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={_ROOT}", "--import-mode=importlib"]
        command += ["-q", "-p", "no:cacheprovider", "-p", outcomes.__name__, "--continue-on-collection-errors"]
        # Without it, tests/conftest.py ends a process a minute after its first failure, and not only one that hangs.
        command += ["-o", "faulthandler_timeout=300"]
        if find_spec("xdist") and num_processes > 1:
            command += ["-n", str(min(num_processes, os.cpu_count() or 1))]
        # Whoever runs this may itself be a process of pytest-xdist: these are not its.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        environment[outcomes.VARIABLE] = str(path)
        code = _code_of([*command, *tests], environment, log, limit_s)
        log.seek(0)
        last, found = log.read().strip()[-500:], outcomes.read(path)
    if not sum(found.counts.values()):
        raise RuntimeError(f"no test was over when pytest ended with {code}: {last}")
    failures = found.failures if code in (0, 1, None) else [f"pytest ended with {code}: {last}", *found.failures]
    is_complete = code in (0, 1)
    detail = {**found.counts, "is_complete": is_complete, "failures": failures[:_NAMED_FAILURES]}
    detail["unfinished"] = found.unfinished[:_NAMED_FAILURES]
    is_met = is_complete and not failures
    name, passed = "tests passed", found.counts["passed"]
    report(Figure(SECTION, name, passed, goal="all", is_goal_met=is_met, detail=detail))
    report(Figure(SECTION, "tests skipped", found.counts["skipped"], detail={}))


def _code_of(command: Sequence[str], environment: dict[str, str], log: TextIO, limit_s: float) -> int | None:
    """With which it ended; None: it did not in time, and was ended. Processes that it started end with the section."""
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
