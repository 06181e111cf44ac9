"""A worker as one rank of several: what it begins with the others, and where it ends rather than leave them waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import ranks_pb2, worker_pb2
from tests.waiting import wait_until
from tests.worker.fake_model import FakeModel, decode, fake_config, prefill
from tests.worker.test_worker import CONFIG, DEADLINE_S
from worker_svc.adapters import reading_on_ranks
from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.errors import GroupError
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker


class Meeting:
    """Where two ranks say something to each other, each on a thread of its own."""

    def __init__(self) -> None:
        self._said: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=DEADLINE_S)

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self._said[rank] = own
        self._barrier.wait()
        everyones = list(self._said)
        self._barrier.wait()
        return everyones


class Adapters:
    """Those of one rank: it reads any path, and computes nothing with them."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # of the next that is read
        self.digest = b"as published"
        self.is_reading, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()
        self.names: dict[str, int] = {}

    def most_bytes(self, max_tokens: int) -> int:
        return 0

    def read(self, path: str) -> Adapter:
        self.is_reading.set()
        assert self.may_read.wait(DEADLINE_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return Adapter("", {}, self.digest)

    def load(self, name: str, generation: int, adapter: Adapter) -> None:
        self.names = {**self.names, name: len(self.names)}

    def clear(self) -> None:
        self.names = {}


class Ranks:
    """A worker of two, which have the same fake model, under a lease of epoch 1."""

    def __init__(self) -> None:
        self.commands: SimpleQueue[ranks_pb2.RankCommand | None] = SimpleQueue()
        self.models, self.adapters = [FakeModel(), FakeModel()], [Adapters(), Adapters()]
        self.ends: list[int] = []  # ranks
        meeting, beside = Meeting(), Meeting()
        self.first, self.other = (self._worker(rank, meeting, beside) for rank in (0, 1))
        threading.Thread(target=self._follow, daemon=True).start()
        self.first.initialize(self.first.bounds).result(DEADLINE_S)
        wait_until(lambda: self.other.sizes is not None, seconds=DEADLINE_S)
        self.first.begin(1).result(DEADLINE_S)

    def _worker(self, rank: int, meeting: Meeting, beside: Meeting) -> Worker:
        group: Any = SimpleNamespace(is_first=rank == 0, member=SimpleNamespace(local_size=2), tell=self.commands.put)
        group.exchange = partial(meeting.exchange, rank)
        group.exchange_aside = partial(beside.exchange, rank)
        adapters = cast(AdapterSet, self.adapters[rank])
        runner = ModelRunner(self.models[rank], fake_config(), CONFIG.block_size, adapters=adapters)
        return Worker(runner, CONFIG, end_process=lambda: self.ends.append(rank), group=group)

    def _follow(self) -> None:
        while (command := self.commands.get()) is not None:
            self.other.thread.submit(partial(self.other.follow, command))

    def load(self, name: str, epoch: int = 1, is_given_up: Callable[[], bool] = lambda: False) -> Future[None]:
        """As the servicer does it: read by rank 0 already."""
        request = worker_pb2.LoadAdapterRequest(name=name, path="a-folder", generation=1, epoch=epoch)
        return self.first.load_adapter(request, self.adapters[0].read(request.path), is_given_up)

    def step(self, step: worker_pb2.Step, epoch: int = 1) -> None:
        """Until both have computed it."""
        before, results = [model.num_forwards for model in self.models], list[worker_pb2.StepResult]()
        self.first.submit(epoch, step, time.perf_counter_ns(), results.append)
        wait_until(lambda: results, seconds=DEADLINE_S)
        assert results[0].status == worker_pb2.STEP_STATUS_OK
        expected = [each + 1 for each in before]
        wait_until(lambda: [model.num_forwards for model in self.models] == expected, seconds=DEADLINE_S)

    def check_loaded(self, *names: str) -> None:
        """By both, once the other one is there as well."""
        wait_until(lambda: all(list(each.names) == list(names) for each in self.adapters), seconds=DEADLINE_S)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.commands.put(None)
    assert ranks.ends == []


def test_a_rank_that_has_read_another_adapter_is_named_by_all(ranks: Ranks) -> None:
    """As of an older copy on its machine, whose products would be added to those of the others."""
    ranks.adapters[1].digest = b"older"
    with pytest.raises(AdapterError, match=r"^rank 1 has read other files than rank 0: a-folder$"):
        ranks.load("one").result(DEADLINE_S)
    ranks.adapters[1].digest = ranks.adapters[0].digest
    ranks.load("two").result(DEADLINE_S)
    ranks.check_loaded("two")


@pytest.mark.parametrize(
    ("error", "said"),
    [(AdapterError("no such folder"), "no such folder"), (KeyError("ours"), "KeyError: 'ours'")],
    ids=["none", "mistake"],
)
def test_a_rank_that_cannot_read_an_adapter_is_named_by_all(error: Exception, said: str, ranks: Ranks) -> None:
    ranks.adapters[1].error = error
    with pytest.raises(AdapterError, match=f"^rank 1: {said}$"):
        ranks.load("one").result(DEADLINE_S)
    ranks.load("two").result(DEADLINE_S)
    ranks.check_loaded("two")


def test_steps_run_while_another_rank_reads_an_adapter(ranks: Ranks) -> None:
    ranks.adapters[1].may_read.clear()
    loading = [ranks.load("one"), ranks.load("two")]
    assert ranks.adapters[1].is_reading.wait(DEADLINE_S)
    ranks.step(prefill(1, [[3]]))
    ranks.step(decode(2, [0]))
    assert not any(each.done() for each in loading)
    ranks.check_loaded()
    ranks.adapters[1].may_read.set()
    for each in loading:
        each.result(DEADLINE_S)
    ranks.check_loaded("one", "two")


def test_a_disk_of_another_rank_that_never_answers_keeps_no_other_adapter_waiting(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_on_ranks, "READ_S", 0.1)
    ranks.adapters[1].may_read.clear()
    for _ in range(reading_on_ranks.MOST_UNREAD):
        with pytest.raises(AdapterError, match=r"^rank 1: a-folder was not read within 0\.1 s$"):
            ranks.load("stuck").result(DEADLINE_S)
    with pytest.raises(AdapterError, match=r"^rank 1: 4 adapters are being read already"):
        ranks.load("one too many").result(DEADLINE_S)
    ranks.adapters[1].may_read.set()  # and what waited ends
    monkeypatch.setattr(reading_on_ranks, "READ_S", DEADLINE_S)
    reading = ranks.other._reading
    assert reading is not None
    wait_until(lambda: all(each.done() for each in reading._unread), seconds=DEADLINE_S)
    ranks.load("another").result(DEADLINE_S)
    ranks.check_loaded("another")


def test_an_adapter_whose_lease_ends_while_it_is_read_is_loaded_by_nobody(ranks: Ranks) -> None:
    ranks.adapters[1].may_read.clear()
    late = ranks.load("late")
    assert ranks.adapters[1].is_reading.wait(DEADLINE_S)
    ranks.first.end().result(DEADLINE_S)
    ranks.first.begin(2).result(DEADLINE_S)
    following = ranks.load("following", epoch=2)
    ranks.adapters[1].may_read.set()
    with pytest.raises(AdapterError, match="epoch 1 is not that of the lease, 2"):
        late.result(DEADLINE_S)
    following.result(DEADLINE_S)
    ranks.check_loaded("following")


def test_an_adapter_that_nobody_waits_for_any_more_is_loaded_by_nobody(ranks: Ranks) -> None:
    """Its scheduler takes it for one that is not here, and would never have it unloaded."""
    ranks.adapters[1].may_read.clear()
    is_given_up = threading.Event()
    loading = ranks.load("late", is_given_up=is_given_up.is_set)
    is_given_up.set()
    ranks.adapters[1].may_read.set()
    with pytest.raises(AdapterError, match="given up"):
        loading.result(DEADLINE_S)
    assert [list(adapters.names) for adapters in ranks.adapters] == [[], []]
    ranks.load("another").result(DEADLINE_S)
    wait_until(
        lambda: [list(adapters.names) for adapters in ranks.adapters] == [["another"], ["another"]], seconds=DEADLINE_S
    )


def test_a_rank_that_fails_alone_in_a_later_initialize_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the cache that was asked for: asked again, they would have nothing to do, and this one would wait
    for them. Where all of them fail, all go on."""
    reasons, ends = list[str](), list[bool]()
    group: Any = SimpleNamespace(is_first=True, member=SimpleNamespace(local_size=1))
    group.exchange, group.tell = (lambda own: [own]), (lambda command: None)
    group.tell_failure = lambda error: reasons.append(str(error))
    runner = ModelRunner(FakeModel(), fake_config(), CONFIG.block_size)
    worker = Worker(runner, CONFIG, end_process=lambda: ends.append(True), group=group)
    worker.initialize(worker.bounds).result(DEADLINE_S)
    smaller = replace(worker.bounds, max_num_seqs=2)
    with monkeypatch.context() as patch:
        patch.setattr(group, "exchange", lambda own: [own, ranks_pb2.RankSizes(error="no room")])
        with pytest.raises(GroupError, match="rank 1: no room"):
            worker.initialize(smaller).result(DEADLINE_S)
    worker.initialize(smaller).result(DEADLINE_S)
    assert ends == reasons == []

    def fail(*_: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "allocate_cache", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.initialize(worker.bounds).result(DEADLINE_S)
    assert ends == [True] and reasons == ["no memory"]
