"""`benchmarks.gpu` without a GPU: every section runs, one that fails costs no other, and what is made of figures."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, served, shapes
from benchmarks.gpu_sections import correctness, figure, host_link, requirements, step_floor, streams
from benchmarks.gpu_sections.continuous_batching import workload
from benchmarks.gpu_sections.figure import Figure
from benchmarks.gpu_sections.launch_gaps import gap_share, idle_share
from benchmarks.gpu_sections.step_floor import StepOp, floor_us, operations
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
    assert values["correctness", "kernel tests passed"] > 0
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


def test_time_that_a_section_leaves_is_the_next_one_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = []

    def in_a_process(section: str, figures: Path, limit_s: float, is_dry_run: bool) -> dict[str, Any]:
        limits.append(round(limit_s))
        return {"ended": "well", "seconds": 0.0, "last_lines": ""}

    monkeypatch.setattr(gpu, "_in_a_process", in_a_process)
    monkeypatch.setattr(gpu, "_has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "_gpu", lambda: {"name": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(tmp_path)])
    assert gpu.main() == 0
    assert limits == [round(each) for each in itertools.accumulate(gpu.SECTIONS.values())] and limits[-1] < 600
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-gpu-nvidia-h100-80gb-hbm3.json")
    assert json.loads(path.read_text())["machine"]["gpu"] == {"name": "NVIDIA H100 80GB HBM3"}


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


def test_results_of_tests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    path.write_text(
        """<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/>
        </testcase><testcase classname="b" name="broken"><error/></testcase><testcase classname="b" name="not here">
        <skipped/></testcase></testsuite></testsuites>"""
    )
    counts, failures = correctness.read_results(path)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1} and failures == ["a::bad", "b::broken"]


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
