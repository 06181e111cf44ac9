"""Every line that times kernels on a GPU, at sizes and with a clock for a CPU; and what is made of the times."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

import pytest
import torch

from kernels.bench import all_cases
from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.ceilings import Ceilings
from kernels.bench.clock import Call, GraphClock, HostClock
from kernels.bench.measure import Row, measure, table
from octavo.cli import main
from tests.kernels.device import DEVICE, IS_INTERPRETED

TINY = Setting(torch.device("cpu"), torch.float32, is_tiny=True)


class Taking:
    """A call without a result, of which the scripted clock is told how many microseconds it takes."""

    def __init__(self, us: float) -> None:
        self.us = us

    def __call__(self) -> None:
        pass


class ScriptedClock:
    """Calls take what they say; all others, those that measure the card among them, 1 microsecond."""

    device = torch.device("cpu")

    def num_sets(self, num_bytes: int) -> int:
        return 1

    def time_us(self, calls: Sequence[Call]) -> float:
        return calls[0].us if isinstance(calls[0], Taking) else 1.0


class OneSetClock(HostClock):
    """Takes one set of inputs: with two of them the interpreter has nearly twice the work, and nothing more is seen."""

    def num_sets(self, num_bytes: int) -> int:
        return 1


def case(shape: str, ours: Calls, goal: Goal | None = None, num_bytes: int = 1000, flops: int = 0) -> Case:
    return Case("op", shape, num_bytes, lambda: ours, flops=flops, goal=goal)


def rows_of(*cases: Case) -> list[Row]:
    return list(measure(cases, ScriptedClock()))


@pytest.mark.skipif(not IS_INTERPRETED, reason="tensors on the CPU need Triton's interpreter")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_case_runs_and_gives_what_its_peers_give() -> None:
    failures: list[str] = []
    rows = list(measure(all_cases.cases(TINY), OneSetClock(), failures.append))
    assert failures == []
    assert {row.op for row in rows} == {case.op for case in all_cases.cases(Setting(torch.device("cpu")))}
    for row in rows:
        assert row.us > 0 and row.of_ceiling > 0 and row.peers, row
        for peer in row.peers:
            assert peer.error == "" and (peer.difference is None or peer.difference < 1e-5), (row.op, row.shape, peer)


def test_shapes_of_the_grid_are_told_apart() -> None:
    named = [(case.op, case.shape) for case in all_cases.cases(Setting(torch.device("cpu")))]
    assert len(set(named)) == len(named)
    references = {case.goal.of_shape for case in all_cases.cases(Setting(torch.device("cpu"))) if case.goal}
    assert references - {""} <= {shape for _, shape in named}


def test_rates_are_bytes_and_operations_over_time() -> None:
    # A copy of 1,000 bytes, 500 read and 500 written, takes 1 us here: 1 GB/s.
    (row,) = rows_of(case("a", Calls(Taking(4.0)), flops=8_000_000))
    assert (row.gb_per_s, row.tflops, row.ceiling, row.of_ceiling) == pytest.approx((0.25, 2.0, 1.0, 0.25))
    (row,) = rows_of(Case("op", "b", 1000, lambda: Calls(Taking(4.0)), flops=8000, product=(10, 20, 30, torch.float32)))
    assert (row.ceiling, row.of_ceiling) == pytest.approx((0.012, 0.002 / 0.012))  # 2 * 10 * 20 * 30 in 1 us


@pytest.mark.parametrize(
    ("goal", "text", "met_below"),
    [
        (Goal(0.5), ">= 50 % of the card", 2.0),
        (Goal(0.6, peer="rival"), ">= 60 % of rival", 5.0),
        (Goal(0.8, of_shape="first"), ">= 80 % of first", 10.0),
        (Goal(300, is_us=True), "<= 300 us", 300.0),
    ],
)
def test_goals_are_met_up_to_their_bound(goal: Goal, text: str, met_below: float) -> None:
    """The card copies as many bytes in 1 us, the rival takes 3, the first shape took 4 for half the operations."""
    first = case("first", Calls(Taking(4.0)), flops=500_000)
    for factor, is_met in ((0.99, True), (1.01, False)):
        rivals = {"rival": Taking(4.0), "rival, in another way": Taking(3.0), "rivalry": Taking(1.0)}
        calls = Calls(Taking(factor * met_below), rivals)
        *_, row = rows_of(first, case("a", calls, goal, flops=1_000_000))
        assert (row.goal, row.is_goal_met) == (text, is_met)


def test_a_goal_without_its_peer_is_neither_met_nor_missed() -> None:
    (row,) = rows_of(case("a", Calls(Taking(1.0)), Goal(0.6, peer="rival")))
    assert row.is_goal_met is None


def test_a_peer_counts_only_with_the_same_result() -> None:
    same, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.2])

    def failing() -> torch.Tensor:
        raise RuntimeError("not for this shape\nand a long story")

    (row,) = rows_of(case("a", Calls(lambda: same, {"good": same.clone, "wrong": other.clone, "failing": failing})))
    errors = {peer.name: peer.error for peer in row.peers}
    assert errors == {
        "good": "",
        "wrong": "another result, by 0.039",
        "failing": "RuntimeError: not for this shape",
    }
    assert row.best_peer is not None and row.best_peer.name == "good"
    nan = torch.tensor([float("nan"), 4.0])
    (row,) = rows_of(case("a", Calls(lambda: nan, {"good": same.clone})))
    assert row.best_peer is None and row.peers[0].error == "another result, by nan"


def test_what_fails_is_told_and_the_rest_is_measured() -> None:
    def failing() -> Calls:
        raise ValueError("no such shape")

    told: list[str] = []
    rows = list(measure([Case("op", "a", 1, failing), case("b", Calls(Taking(2.0)))], ScriptedClock(), told.append))
    assert [row.shape for row in rows] == ["b"] and told == ["op, a: ValueError: no such shape"]


class FailingDevice:
    """Stands for a GPU on which one call fails, after which it may compute nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool) -> None:
        self._is_lost, self._has_failed = is_lost, False
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def fail(self) -> None:
        self._has_failed = True
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    def build(self) -> Calls:
        self.fail()
        raise AssertionError

    def _synchronize(self, device: torch.device) -> None:
        assert device.type == "cuda"
        if self._is_lost and self._has_failed:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class ScriptedGpuClock(ScriptedClock):
    device = torch.device("cuda")


@pytest.mark.parametrize("is_peer", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_after_a_device_is_lost_nothing_more_is_tried(
    monkeypatch: pytest.MonkeyPatch, is_peer: bool, is_lost: bool
) -> None:
    """An error that is of one call alone costs no other. What failed is told before."""
    device, told = FailingDevice(monkeypatch, is_lost=is_lost), list[str]()
    failing = case("b", Calls(Taking(1.0), {"rival": device.fail})) if is_peer else Case("op", "b", 1, device.build)
    cases = [case("a", Calls(Taking(2.0))), failing, case("c", Calls(Taking(2.0)))]
    monkeypatch.setattr("kernels.bench.measure.Ceilings", lambda clock: Ceilings(ScriptedClock()))
    rows, measured = [], measure(cases, ScriptedGpuClock(), told.append)
    with pytest.raises(RuntimeError, match="illegal memory") if is_lost else contextlib.nullcontext():
        for row in measured:
            rows.append(row.shape)
    assert rows == (["a"] if is_lost else ["a", "b", "c"] if is_peer else ["a", "c"])
    line = "op, b: RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"
    assert told == ([line] if is_lost or not is_peer else [])


def test_the_table_has_a_line_a_row() -> None:
    rows = rows_of(
        case("a", Calls(Taking(4.0), {"slow": Taking(9.0), "quick": Taking(6.0)}), Goal(0.2)),
        case("b", Calls(Taking(2))),
    )
    assert table(rows).splitlines()[2:] == [
        "| op | a | 4.0 | 0 GB/s | 25 % | quick | 1.50 | >= 20 % of the card | yes |",
        "| op | b | 2.0 | 0 GB/s | 50 % | - | - | - | - |",
    ]


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 1
    said = capsys.readouterr().err
    assert said == "octavo bench: error: there is no GPU to time kernels on; --compile-only needs none\n"


@pytest.mark.skipif(not IS_INTERPRETED, reason="tensors on the CPU need Triton's interpreter")
def test_the_command_prints_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr("kernels.bench.clock.GraphClock", lambda device: HostClock())
    monkeypatch.setattr("kernels.bench.case.Setting", lambda device: TINY)
    assert main(["bench", "kernels", "--op", "gelu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["gpu"], printed["failures"]) == ("a card", [])
    (row,) = printed["rows"]
    assert (row["op"], row["shape"], row["best_peer"]) == ("gelu", "3 x 48", "gelu")
    assert main(["bench", "kernels", "--op", "gelu"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("| operation |") and said.out.splitlines()[-1] in said.err.splitlines()
    assert main(["bench", "kernels", "--op", "division"]) == 2
    assert "no operation is called 'division'; there are paged_attention" in capsys.readouterr().err


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is a GPU")
def test_the_command_keeps_what_was_measured_before_the_device_was_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = FailingDevice(monkeypatch, is_lost=True)
    cases = [case("a", Calls(Taking(2.0))), Case("op", "b", 1, lost.build), case("c", Calls(Taking(2.0)))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("kernels.bench.clock.GraphClock", lambda device: ScriptedGpuClock())
    monkeypatch.setattr("kernels.bench.all_cases.cases", lambda setting, name: cases)
    monkeypatch.setattr("kernels.bench.measure.Ceilings", lambda clock: Ceilings(ScriptedClock()))
    assert main(["bench", "kernels"]) == 1
    said = capsys.readouterr()
    assert [line.split(" | ")[1] for line in said.out.splitlines()[2:]] == ["a"]
    assert said.err.splitlines()[1:] == [
        "op, b: RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "the GPU computes nothing more for this process: other operations were not timed",
    ]


class FakeDevice:
    """Of torch.cuda what the graph clock uses: a time that only calls move on, and graphs that repeat what they saw."""

    L2_cache_size = 50 << 20

    def __init__(self) -> None:
        self.now_us = 0.0
        self.num_started = 0

    def calling(self, us: float) -> Call:
        def call() -> None:
            self.now_us += us

        return call

    @contextlib.contextmanager
    def capture(self, graph: FakeGraph) -> Iterator[None]:
        started_us = self.now_us
        yield
        graph.us, self.now_us = self.now_us - started_us, started_us

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.us = device.now_us

            def elapsed_time(self, end: Event) -> float:
                return (end.us - self.us) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(device))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self)


class FakeGraph:
    def __init__(self, device: FakeDevice) -> None:
        self.us = 0.0
        self._device = device

    def replay(self) -> None:
        self._device.num_started += 1
        self._device.now_us += self.us + (1000.0 if self._device.num_started == 4 else 0.0)  # something came between


def test_the_graph_clock_gives_the_median_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    device.install(monkeypatch)
    clock = GraphClock(torch.device("cuda"))
    assert clock.time_us([device.calling(3.0), device.calling(5.0)]) == pytest.approx(4.0)
    assert device.num_started == 10
    assert clock.time_us([device.calling(9e4)]) == pytest.approx(9e4)  # longer than a graph is meant to be: once in it
    assert [clock.num_sets(num_bytes) for num_bytes in (1, 30 << 20, 1 << 30)] == [128, 5, 2]


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="a CUDA graph needs a GPU")
def test_the_graph_clock_agrees_with_what_a_copy_can_take() -> None:
    clock = GraphClock(torch.device(DEVICE))
    large, small = (Ceilings(clock).copy_gb_per_s(num_bytes) for num_bytes in (1 << 30, 1 << 12))
    assert 100 < large < 20_000 and small < large / 4
