"""What is measured at the start, on a device whose memory is its own and on one whose memory is the host's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import select
from tests.worker.fake_model import FakeModel, fake_config
from tests.worker.replayed_graphs import ReplayedGraphs
from worker_svc.cache.cache_sizing import Limits
from worker_svc.host.device_memory import HostMemory
from worker_svc.models.attention import AttentionMetadata
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.profile import Profile, Profiler

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64)


class OwnMemory(HostMemory):
    """Of a device that is not the host, whose peak is known."""

    is_host = False

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 1000


class Recorder(FakeModel):
    """Remembers the shape of each step: tokens of each row, rows of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[list[int], int]] = []

    def forward(self, token_ids, positions, caches, attention: AttentionMetadata, logits_rows, reader=None, out=None):
        self.steps.append((attention.query_starts.diff().tolist(), len(logits_rows)))
        return super().forward(token_ids, positions, caches, attention, logits_rows, reader, out)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Recorder()


def test_a_device_of_its_own_is_measured_with_the_largest_step(
    model: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    profiler = Profiler(ModelRunner(model, fake_config(), 4), OwnMemory())
    profile = profiler.measure(LIMITS)
    largest, few = [([6, 6, 5, 5, 5, 5], 6), ([1] * 6, 6)], [([32], 1), ([1], 1)]
    assert model.steps[-8:] == [*largest, *largest, *few, *few]  # of memory and of speed the second time is measured
    assert (profile.num_tokens, profile.peak_bytes, profile.is_whole) == (32, 1000, True)
    # What attention uses is not of a step: it is there before. A line of 8,192 positions of each sequence, or 8,192.
    config, sums = fake_config(), 4 * (fake_config().head_size + 2)
    kept = 3 * 128 * sums  # of three multiprocessors, as the interpreter has them
    assert profiler.step_bytes(profile, LIMITS) == 1000 + 8192 * config.num_heads * sums + kept
    longer = Limits(6, 32, 1400 * 8192 + 1)
    assert profiler.step_bytes(profile, longer) == 1000 + 6 * 1401 * config.num_heads * sums + kept


def test_no_profiled_sequence_is_longer_than_the_model_takes(model: Recorder) -> None:
    profiler = Profiler(ModelRunner(model, fake_config(), 4), OwnMemory())
    assert profiler.measure(Limits(2, 256, 64)).num_tokens == 124
    assert model.steps[-8] == ([62, 62], 2)


def test_steps_that_no_graph_is_captured_of_are_computed_once_before_they_are_served(model: Recorder) -> None:
    """A GPU's kernels are compiled at their first call: products for 16 rows, 32 and 64, whole and in segments."""
    runner = ModelRunner(model, fake_config(), 4)
    Profiler(runner, OwnMemory()).measure(LIMITS)
    compiled = [(sum(lengths), num_rows) for lengths, num_rows in model.steps[2:-8]]
    assert compiled == [(16, 6), (6, 6), (24, 6), (6, 6), (32, 6), (6, 6)]
    model.steps.clear()
    Profiler(ModelRunner(model, fake_config(), 4, graph_backend=ReplayedGraphs), OwnMemory()).measure(LIMITS)
    assert len(model.steps) == 2 + 8, "captures do that"


@pytest.mark.parametrize(
    ("seconds", "max_tokens", "lengths"),
    [(0.1, 512, [8, 32, 128]), (0.1, 40, [8, 32, 40]), (0.1, 32, [8, 32]), (0.1, 5, [5, 5]), (0.3, 512, [8, 32])],
)
def test_on_the_host_a_prefill_is_no_longer_than_soon_measured(
    model: Recorder, monkeypatch: pytest.MonkeyPatch, seconds: float, max_tokens: int, lengths: list[int]
) -> None:
    def timed(self: Profiler, work: Callable[[], object]) -> float:
        work()
        return seconds

    monkeypatch.setattr(Profiler, "_seconds", timed)
    profiler = Profiler(ModelRunner(model, fake_config(), 4), HostMemory())
    profile = profiler.measure(Limits(max_num_seqs=6, max_num_batched_tokens=max_tokens, max_model_len=1024))
    assert model.steps == [([count], 1) for length in lengths for count in (length, 1)]
    assert (profile.num_tokens, profile.is_whole) == (lengths[-1], False)
    assert profile.prefill_tokens_per_s == pytest.approx(lengths[-1] / seconds)


@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_ranks_measure_the_same_steps_whatever_their_clocks_say(
    model: Recorder, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """One that measured a step less than the others would leave these waiting for it."""

    def timed(self: Profiler, work: Callable[[], object]) -> float:
        work()
        return seconds

    monkeypatch.setattr(Profiler, "_seconds", timed)
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=512, max_model_len=1024)
    Profiler(ModelRunner(model, fake_config(), 4), HostMemory()).measure(limits, is_alone=False)
    assert model.steps == [([count], 1) for length in (8, 128) for count in (length, 1)]


def test_on_the_host_a_small_prefill_is_scaled_up(model: Recorder) -> None:
    profiler = Profiler(ModelRunner(model, fake_config(), 4), HostMemory())
    one, two = (profiler.step_bytes(Profile(10, 500, False, 1.0), Limits(6, num_tokens, 64)) for num_tokens in (10, 20))
    assert two - one == 500
    rows = [profiler.step_bytes(Profile(10, 0, False, 1.0), Limits(n, 512, 64)) for n in (1, 256)]
    assert rows[0] < rows[1]


def test_swaps_are_timed_where_there_are_host_blocks(model: Recorder) -> None:
    runner = ModelRunner(model, fake_config(), 4)
    profiler = Profiler(runner, HostMemory())
    runner.allocate_cache(8, 0)
    assert profiler.swap_bytes_per_s() == 0
    runner.allocate_cache(8, 5)
    assert profiler.swap_bytes_per_s() > 0


@pytest.mark.parametrize("is_host", [True, False])
def test_copies_are_compiled_at_the_start_where_no_swap_does_it(
    model: Recorder, monkeypatch: pytest.MonkeyPatch, is_host: bool
) -> None:
    runner, memory = ModelRunner(model, fake_config(), 4), HostMemory()
    runner.allocate_cache(8, 0)
    copied: list[list[list[int]]] = []
    monkeypatch.setattr(runner.cache, "copy", lambda pairs: copied.append(pairs.tolist()))
    monkeypatch.setattr(type(memory), "is_host", is_host)
    assert Profiler(runner, memory).swap_bytes_per_s() == 0
    assert copied == ([] if is_host else [[[0, 1]]])


def test_swaps_in_host_memory_touch_nothing_of_a_runners_cache(model: Recorder) -> None:
    runner = ModelRunner(model, fake_config(), 4)
    runner.allocate_cache(8, 5)
    for part in runner.cache.layers[0]:
        part.fill_(1)
    pairs = torch.arange(5)[:, None].expand(-1, 2).contiguous()
    Profiler(runner, HostMemory()).swap_bytes_per_s()
    assert all((part == 1).all() for part in runner.cache.layers[0])
    runner.cache.swap_in(pairs)  # what the host blocks hold: the zeros that they began with
    assert not any(part[:5].any() for part in runner.cache.layers[0])


def test_swaps_are_asked_for_from_the_host_whatever_the_device(
    model: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(model, fake_config(), 4)
    runner.allocate_cache(8, 5)
    runner.device = torch.device("meta")
    monkeypatch.setattr(runner, "new_cache", lambda *_: runner.cache)
    asked: list[torch.Tensor] = []
    for name in ("swap_out", "swap_in"):
        monkeypatch.setattr(runner.cache, name, asked.append)
    Profiler(runner, HostMemory()).swap_bytes_per_s()
    assert asked and all(pairs.device.type == "cpu" for pairs in asked)
