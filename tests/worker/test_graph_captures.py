"""Which graphs are kept within an amount of memory, where they share it as torch has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.fake_model import FakeModel, fake_config
from tests.worker.replayed_graphs import ReplayedGraphs
from tests.worker.test_worker import CONFIG
from worker_svc.steps.graph_captures import capture_within
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker


class Captured:
    """A graph, or what stands for one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def replay(self) -> None:
        raise NotImplementedError


class Pools:
    """Memory as torch's allocator has it: a graph takes what its pool lacks, and a pool is given back when all of its
    graphs are gone, after which torch asserts that nobody captures into it."""

    def __init__(self) -> None:
        self.pools: list[tuple[list[int], weakref.WeakSet[Captured]]] = [([], weakref.WeakSet())]

    def new_pool(self) -> None:
        self.pools.append(([], weakref.WeakSet()))

    def capture(self, work: Callable[[], None]) -> Captured:
        raise NotImplementedError

    def take(self, size: int) -> Captured:
        sizes, graphs = self.pools[-1]
        assert not sizes or graphs, "use_count > 0"
        sizes.append(size)
        graphs.add(captured := Captured(size))
        return captured

    def bytes_taken(self) -> int:
        return sum(max(sizes) for sizes, graphs in self.pools if graphs)


@pytest.mark.parametrize(
    ("most_bytes", "expected"),
    [(100, [90, 60, 30]), (60, [60, 30]), (59, [30]), (29, [])],
)
def test_smaller_ones_are_kept_where_larger_ones_find_no_room(most_bytes: int, expected: list[int]) -> None:
    pools = Pools()
    kept = capture_within(most_bytes, pools, [90, 60, 30], pools.take, "step")
    assert [one.size for one in kept] == expected
    assert pools.bytes_taken() == max(expected, default=0) <= most_bytes


def test_what_others_have_taken_counts() -> None:
    pools = Pools()
    small = capture_within(100, pools, [10, 20], pools.take, "step")
    large = capture_within(100, pools, [90, 80, 70], pools.take, "step")
    assert [one.size for one in small + large] == [10, 20, 80, 70]
    assert pools.bytes_taken() == 20 + 80


def test_nothing_is_captured_where_what_graphs_use_is_too_much_already() -> None:
    pools = Pools()
    tensors = pools.take(101)
    assert capture_within(100, pools, [90, 1], pools.take, "step") == []
    assert pools.bytes_taken() == tensors.size and len(pools.pools) == 1, "no other was tried"


def test_after_a_capture_without_memory_the_next_has_a_pool_of_its_own() -> None:
    pools = Pools()

    def take(size: int) -> Captured:
        captured = pools.take(size)
        if size > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return captured

    assert [one.size for one in capture_within(100, pools, [90, 60, 30], take, "step")] == [30]


class Lacking(FakeModel):
    """Has no memory for a pass that is captured."""

    def forward(self, token_ids, positions, caches, attention, logits_rows, reader=None, out=None):
        if out is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(token_ids, positions, caches, attention, logits_rows, reader, out)


@pytest.mark.parametrize("has_others", [False, True])
def test_a_rank_without_memory_for_a_graph_ends_as_others_wait_for_it(has_others: bool) -> None:
    group: Any = SimpleNamespace(is_first=False, member=SimpleNamespace(local_size=1))
    reasons = list[Exception]()
    group.exchange, group.tell_failure = (lambda own: [own]), reasons.append
    runner, ends = ModelRunner(Lacking(), fake_config(), CONFIG.block_size, graph_backend=ReplayedGraphs), list[bool]()
    worker = Worker(runner, CONFIG, end_process=lambda: ends.append(True), group=group if has_others else None)
    initialized = worker.initialize(worker.bounds)
    assert isinstance(initialized.exception(30), torch.OutOfMemoryError if has_others else type(None))
    assert ends == [True] * has_others and len(reasons) == len(ends)


def test_a_rank_tries_what_the_others_try_whatever_is_taken_already() -> None:
    """They wait for it in each capture."""
    pools, tried = Pools(), list[int]()
    tensors = pools.take(101)

    def take(size: int) -> Captured:
        tried.append(size)
        return pools.take(size)

    assert capture_within(100, pools, [90, 60], take, "step", is_alone=False) == []
    assert tried == [90, 60] and tensors.size == 101
