"""`benchmarks.gpu` without a GPU: every section runs, one that fails costs no other, and what is made of figures."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, served, shapes
from benchmarks.gpu_sections import (
    correctness,
    decode_step,
    figure,
    host_link,
    kernels,
    requirements,
    step_floor,
    streams,
)
from benchmarks.gpu_sections.continuous_batching import workload
from benchmarks.gpu_sections.figure import Figure
from benchmarks.gpu_sections.launch_gaps import gap_share, idle_share
from benchmarks.gpu_sections.step_floor import StepOp, floor_us, operations
from kernels.bench.case import Calls, Case
from kernels.bench.clock import HostClock
from tests.forkserver import ForkedCommand
from tests.kernels.device import IS_INTERPRETED


def test_every_section_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in a process of its own, as on a GPU all are; others here, where most of what they import is imported, and
    with services that are forked."""
    in_a_process = gpu._in_a_process

    def forked(command: list[str], *, stdout: int, env: dict[str, str]) -> ForkedCommand:
        assert command[:3] == [sys.executable, "-m", "octavo"] and env.items() <= dict(os.environ).items()
        return ForkedCommand(command[3:])

    def in_this_one(section: str, figures: Path, limit_s: float, is_dry_run: bool) -> dict[str, Any]:
        if section == "kernels" or not IS_INTERPRETED:
            return in_a_process(section, figures, limit_s, is_dry_run)
        code = gpu._run_section(section, figures, is_dry_run)
        return {"ended": "well" if code == 0 else f"exit code {code}", "seconds": 0.0, "last_lines": ""}

    if IS_INTERPRETED:
        monkeypatch.setattr(served, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
        monkeypatch.setattr(served, "ends_with_parent", list)
    monkeypatch.setattr(gpu, "_in_a_process", in_this_one)
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--results", str(tmp_path)])
    code, said = gpu.main(), capsys.readouterr()
    assert code == 0, said
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-gpu-dry-run.json")
    result = json.loads(path.read_text())
    assert result["is_dry_run"] and set(result["sections"]) == set(gpu.SECTIONS)
    assert {ending["ended"] for ending in result["sections"].values()} == {"well"}
    values = {(one["section"], one["name"]): one["value"] for one in result["figures"]}
    assert all(value is not None or name.startswith("launch gaps") for (_, name), value in values.items()), values
    for name in ("decode step over that sum", "the whole service beside the bare worker"):
        assert [value > 0 for (_, found), value in values.items() if found == name] == [True]
    assert values["continuous batching", "Octavo over Generate"] > 0
    assert values["mixed steps", "Qwen3 0.6B, 3 sequences decode beside a chunk of 4"] > 0
    assert values["correctness", "tests passed"] > 0
    assert f"| kernels | {next(name for section, name in values if section == 'kernels')} |" in said.out


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "_has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 1
    assert "there is no GPU here" in capsys.readouterr().err


def test_a_section_that_fails_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    found = Figure("a section", "a figure", 1.0)
    figure.write(figures, found)
    if not torch.cuda.is_available():
        failed = gpu._in_a_process("decode_step", figures, 120.0, is_dry_run=False)
        assert failed["ended"] == "exit code 1" and "CUDA" in failed["last_lines"]
    late = gpu._in_a_process("decode_step", figures, 0.2, is_dry_run=True)
    assert late["ended"] == "not within 0 s" and late["seconds"] < 10
    assert gpu._in_a_process("kernels", figures, -1.0, is_dry_run=True)["ended"] == "no time was left"
    assert figure.read(figures)[0] == found


class _Sections:
    """In place of their processes, on a clock of its own: each takes no time, or ends everything as a signal would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: Path, ends_in: str = "") -> None:
        self.limits: list[float] = []
        self._now_s, self._ends_in = 1000.0, ends_in
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self._now_s))
        monkeypatch.setattr(gpu, "_in_a_process", self._run)
        monkeypatch.setattr(gpu, "_has_gpu", lambda: True)
        monkeypatch.setattr(gpu, "_gpu", self._ask_the_card)
        monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(results)])

    def _ask_the_card(self) -> dict[str, Any]:
        self._now_s += 12.0  # as to import torch may take
        return {"name": "NVIDIA H100 80GB HBM3"}

    def _run(self, section: str, figures: Path, limit_s: float, is_dry_run: bool) -> dict[str, Any]:
        self.limits.append(limit_s)
        figure.write(figures, Figure(section, "a figure", 3.5))
        if section == self._ends_in:
            raise KeyboardInterrupt
        return {"ended": "well", "seconds": 0.0, "last_lines": ""}


def test_time_that_a_section_leaves_is_the_next_one_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And everything is over in less than ten minutes after its first line."""
    sections = _Sections(monkeypatch, tmp_path)
    assert gpu.main() == 0
    assert sections.limits == [gpu.START_S - 12 + each for each in itertools.accumulate(gpu.SECTIONS.values())]
    assert gpu.START_S + sum(gpu.SECTIONS.values()) <= 540
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-gpu-nvidia-h100-80gb-hbm3.json")
    assert json.loads(path.read_text())["machine"]["gpu"] == {"name": "NVIDIA H100 80GB HBM3"}


def test_what_was_found_outlasts_an_end_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _Sections(monkeypatch, tmp_path / "not" / "here", ends_in="decode_step")
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    (path,) = (tmp_path / "not" / "here").iterdir()
    result = json.loads(path.read_text())
    assert [one["section"] for one in result["figures"]] == ["correctness", "kernels"]
    assert [ending["ended"] for ending in result["sections"].values()] == ["well"] * 2 + ["not begun"] * 5
    printed = capsys.readouterr().out
    assert printed.count("| part | what |") == 2 and printed.count("| kernels | a figure | 3.5 |") == 1


def test_results_that_nobody_can_write_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    sections = _Sections(monkeypatch, tmp_path / "file" / "results")
    assert gpu.main() == 1 and sections.limits == []
    assert capsys.readouterr().err == f"--results: cannot make {tmp_path}/file/results: Not a directory\n"


def test_facts_of_the_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card = SimpleNamespace(name="a card", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    exec(gpu._FACTS, {})
    facts = json.loads(capsys.readouterr().out)
    assert (facts["name"], facts["memory_gib"], facts["capability"]) == ("a card", 80.0, "9.0")


def test_the_link_to_the_host_is_as_fast_as_its_slower_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.ms = now_ms

        def elapsed_time(self, end: Event) -> float:
            return end.ms - self.ms

    class Memory:
        def __init__(self, size: int, *, device: str = "cpu", **options: Any) -> None:
            self.device = device

        def copy_(self, source: Memory, non_blocking: bool) -> None:
            nonlocal now_ms
            assert non_blocking and source.device != self.device
            now_ms += 40.0 if self.device == "cuda" else 20.0

    monkeypatch.setattr(torch, "empty", Memory)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert host_link.gb_per_s() == pytest.approx((256 << 20) / 1e6 / 40)


def test_versions_that_do_not_fit_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.problem() == ""

    def refuse(name: str) -> None:
        raise RuntimeError("grpcio 1.80 is wanted")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert requirements.problem() == "protobuf or grpcio does not fit: grpcio 1.80 is wanted"


def test_what_is_missing_is_named_with_the_way_to_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.missing() == []
    monkeypatch.setattr(requirements, "_MODULES", {"torch": "torch", "no_such.part": "no-such", "nothing": "other"})
    assert requirements.missing() == ["no-such", "other"]
    assert "pip install --target brought --no-deps no-such other" in requirements.how_to_bring(["no-such", "other"])


def test_figures_travel_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert figure.read(path) == []
    figures = [
        Figure("one", "speed", 1234.5, "us", "< 2,000 us", True, {"runs": 3}),
        Figure("two", "share", None, detail={"error": "no"}),
    ]
    for one in figures:
        figure.write(path, one)
    assert figure.read(path) == figures
    assert (figure.value_of(figures, "speed"), figure.value_of(figures, "other")) == (1234.5, None)
    assert figure.table(figures).splitlines()[2:] == [
        "| one | speed | 1,234 us | < 2,000 us | yes |",
        "| two | share | not measured | - | - |",
    ]


_TESTS = """
import os, pytest

def test_good(): pass

def test_bad(): assert 1 == 2, "not that"

@pytest.fixture
def broken(): raise ValueError("no such thing")

def test_broken(broken): pass

@pytest.mark.skip(reason="no")
def test_not_here(): pass

def test_last(): {last}
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_results_of_tests_are_there_however_pytest_ends(tmp_path: Path, is_killed: bool) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS.format(last="os.kill(os.getpid(), 9)" if is_killed else "pass"))
    (tmp_path / "test_other.py").write_text("import no_such_module")
    figures: list[Figure] = []
    correctness.run_tests(figures.append, [str(tmp_path)])
    passed, skipped = figures
    assert (passed.value, skipped.value, passed.is_goal_met) == (1 if is_killed else 2, 1, False)
    detail = passed.detail
    assert (detail["passed"], detail["failed"], detail["is_complete"]) == (passed.value, 3, not is_killed)
    failures = "\n".join(detail["failures"])
    assert "test_other.py: " in failures and "No module named 'no_such_module'" in failures
    assert "::test_bad: AssertionError: not that" in failures and "::test_broken: ValueError: no such thing" in failures
    assert ("pytest ended with -9" in failures) == is_killed
    assert [name.rpartition("::")[2] for name in detail["unfinished"]] == ["test_last"] * is_killed


def test_the_goal_is_met_by_all_tests_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one that fails does not end all, as tests/conftest.py would have it a minute later."""
    (tmp_path / "test_some.py").write_text(
        "def test_good(pytestconfig):\n    assert pytestconfig.getini('faulthandler_timeout')"
    )
    figures: list[Figure] = []
    correctness.run_tests(figures.append, [str(tmp_path)])
    assert (figures[0].value, figures[0].is_goal_met) == (1, True)
    code_of = correctness._code_of

    def too_late(*arguments: Any) -> None:
        code_of(*arguments)

    monkeypatch.setattr(correctness, "_code_of", too_late)
    correctness.run_tests(figures.append, [str(tmp_path)])
    assert (figures[2].value, figures[2].is_goal_met, figures[2].detail["is_complete"]) == (1, False, False)
    with (tmp_path / "log").open("w") as log:
        assert code_of([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), log, 0.1) is None


def test_without_a_test_that_is_over_the_section_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)no test was over when pytest ended with 4: .*nothing_here"):
        correctness.run_tests(lambda one: None, [str(tmp_path / "nothing_here.py")])


def test_tests_of_a_cpu_are_left_to_machines_without_a_gpu() -> None:
    """Those that import its kernels, and none of the GPU's."""
    folder = Path(__file__).parent / "kernels"
    of_a_cpu = set()
    for path in folder.glob("test_*.py"):
        imports = "\n".join(line for line in path.read_text().splitlines() if line.startswith(("from ", "import ")))
        if re.search(r"kernels\.cpu|kernels import .*cpu", imports) and not re.search(
            r"kernels\.(gpu|device)", imports
        ):
            of_a_cpu.add(path.stem.removeprefix("test_"))
    assert of_a_cpu == {*correctness.ON_A_CPU, *(name for name in of_a_cpu if name.startswith("cpu_"))}
    assert all((Path(__file__).parents[1] / name.partition("::")[0]).exists() for name in correctness.OF_A_WORKER)


def test_kernels_that_fail_are_figures_at_once() -> None:
    """Also the last ones, after which none succeeds."""

    def failing() -> Calls:
        raise ValueError("no such shape: 3")

    figures: list[Figure] = []
    kernels.measure_all([Case("op", "3 x 4", 1, failing)], HostClock(), figures.append)
    assert figures == [Figure("kernels", "op, 3 x 4", None, detail={"error": "ValueError: no such shape: 3"})]


def test_gaps_are_what_no_kernel_covers() -> None:
    assert idle_share([(0, 4), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(6, 10), (0, 4), (3, 7)]) == 0  # in any order, side by side
    assert idle_share([(0, 10), (2, 3), (15, 20)]) == pytest.approx(0.25)
    assert idle_share([(5, 5)]) == 0


def test_a_profile_gives_the_gaps_of_what_ran() -> None:
    x = torch.ones(64, 64)
    assert 0 < gap_share(lambda: [x @ x for _ in range(20)], device="cpu") < 1
    with pytest.raises(RuntimeError, match="saw no kernels"):
        gap_share(lambda: None, device="cpu")


class _Card:
    """Copies 1,000 GB/s and multiplies at 100 TFLOP/s."""

    def copy_gb_per_s(self, num_bytes: int) -> float:
        return 1000.0

    def matrix_tflops(self, *product: Any) -> float:
        return 100.0


def test_an_operation_needs_the_longer_of_its_two_times() -> None:
    def us(op: StepOp) -> float:
        return floor_us(op, _Card(), torch.bfloat16)  # type: ignore[arg-type]  # a fake

    assert us(StepOp("copy", 3, 1_000_000)) == pytest.approx(3.0)
    assert us(StepOp("attention", 1, 1_000_000, share=0.5)) == pytest.approx(2.0)
    assert us(StepOp("small product", 1, 1_000_000, (1, 1, 1))) == pytest.approx(1.0)
    assert us(StepOp("large product", 2, 1_000_000, (500, 1000, 1000))) == pytest.approx(20.0)


def test_a_decode_step_reads_every_weight_and_all_of_the_cache() -> None:
    config, batch, context = shapes.LLAMA_3_8B, 256, 1024
    ops = {op.name: op for op in operations(config, batch, context, 2)}
    products = [op for op in ops.values() if op.product]
    weights = sum(op.count * op.product[1] * op.product[2] for op in products if op.product)
    # Llama 3 8B has 8.03 billion parameters, of which the embedding's 0.525 are not multiplied and the norms' are few.
    assert weights == pytest.approx(8.03e9 - 0.525e9, rel=0.001)
    cache_bytes = batch * context * 32 * 2 * 8 * 128 * 2
    assert ops["attention"].count * ops["attention"].num_bytes == pytest.approx(cache_bytes, rel=0.01)
    assert {op.share for op in ops.values()} == {1.0, step_floor._ATTENTION_SHARE}


class _CountingWorker:
    """A step takes as many microseconds as its sequences have tokens; the first of a call is not timed."""

    length = most = 0

    def start(self, num_seqs: int, context: int, num_steps: int) -> None:
        self.length, self.most = context, context + num_steps

    def decode(self, num_steps: int, swapped_bytes: int = 0) -> list[float]:
        lengths = range(self.length + 1, self.length + num_steps + 1)
        self.length += num_steps
        return [float(length) for length in lengths[1:]]


def test_steps_with_and_without_swaps_have_the_context_that_is_named() -> None:
    worker = _CountingWorker()
    plain, beside = decode_step.times_us(worker, 256, 1024)  # type: ignore[arg-type]  # a fake
    assert sum(plain) / len(plain) == sum(beside) / len(beside) == 1024
    assert not set(plain) & set(beside) and min(len(plain), len(beside)) > 40
    assert worker.most - worker.length == 16, "for the steps to be profiled"


def test_rates_of_streams() -> None:
    second = 1_000_000_000
    requests = [[(2 * second, 5), (4 * second, 10), (8 * second, 10)], [(3 * second, 1), (6 * second, 9)]]
    assert streams.tokens_per_s(requests, second) == pytest.approx(35 / 7)
    assert streams.steady_tokens_per_s(requests) == pytest.approx((10 + 9) / 3)  # from 3 s to 6 s
    with pytest.raises(RuntimeError, match="outputs are too short"):
        streams.steady_tokens_per_s([[(1, 1), (2, 1)], [(2, 1), (3, 1)]])


def test_lengths_are_uniform_between_their_bounds() -> None:
    requests = workload(256, (100, 1024))
    assert requests == workload(256, (100, 1024)) and len(requests) == 256
    for lengths in ([len(one.prompt_token_ids) for one in requests], [one.max_tokens for one in requests]):
        assert 100 <= min(lengths) < 120 and 1004 < max(lengths) <= 1024 and 520 < sum(lengths) / 256 < 604
