"""Who holds how many workers where schedulers share a pool: their shares, what nobody has, and what is given back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from protos import worker_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.workers.worker_quota import MAX_FREE, WorkerQuota

AFTER_S = 5.0


@dataclass
class SharedPool:
    """Schedulers with their quotas, each asking for every worker once a second; who holds which."""

    num_workers: int
    now_s: float = 0.0
    quotas: dict[str, WorkerQuota] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)
    num_given_back: int = 0

    def come(self, name: str, share: int | None) -> None:
        self.quotas[name] = WorkerQuota(share, AFTER_S, clock=lambda: self.now_s)

    def die(self, name: str) -> None:
        del self.quotas[name]
        self.holders = {worker: holder for worker, holder in self.holders.items() if holder != name}

    def held(self, name: str) -> int:
        return list(self.holders.values()).count(name)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for worker in range(self.num_workers):
                for name in self.quotas:
                    self._ask(name, worker)

    def _ask(self, name: str, worker: int) -> None:
        holder = self.holders.get(worker)
        if holder == name:
            return
        leased, free = worker_pb2.WORKER_LIFECYCLE_LEASED, worker_pb2.WORKER_LIFECYCLE_INITIALIZED
        info = worker_pb2.WorkerInfo(instance_id=str(worker), lifecycle=free if holder is None else leased)
        if self.quotas[name].refusal(info, self.held(name)):
            return
        if holder is None:
            self.holders[worker] = name
            self.quotas[name].has_joined(info)
        elif self.quotas[name].asks(self.held(name) + 1) and self.quotas[holder].gives_back(self.held(holder)):
            del self.holders[worker]  # it is free once what runs there has been answered
            self.num_given_back += 1

    def shares(self) -> dict[str, int]:
        return {name: self.held(name) for name in self.quotas}


def test_two_share_a_pool_whoever_comes_first() -> None:
    pool = SharedPool(4)
    pool.come("a", 2)
    pool.pass_s(2)
    assert pool.shares() == {"a": 2}, "the others may be taken by another one for a while"
    pool.pass_s(6)
    assert pool.shares() == {"a": 4}
    pool.come("b", 2)
    pool.pass_s(3)
    assert pool.shares() == {"a": 2, "b": 2}
    given_back = pool.num_given_back
    pool.pass_s(60)
    assert pool.shares() == {"a": 2, "b": 2} and pool.num_given_back == given_back == 2, "and they rest"


def test_one_takes_over_from_the_other_and_gives_back_what_that_wants_again() -> None:
    pool = SharedPool(4)
    pool.come("a", 2)
    pool.come("b", 2)
    pool.pass_s(3)
    pool.die("a")
    pool.pass_s(3)
    assert pool.shares() == {"b": 2}, "a process that is started again at once finds its workers"
    pool.pass_s(5)
    assert pool.shares() == {"b": 4}
    pool.come("a", 2)
    pool.pass_s(3)
    assert pool.shares() == {"b": 2, "a": 2}


def test_standby_holds_nothing_until_the_other_is_gone() -> None:
    pool = SharedPool(3)
    pool.come("standby", 0)
    pool.come("active", 3)
    pool.pass_s(20)
    assert pool.shares() == {"standby": 0, "active": 3}
    pool.die("active")
    pool.pass_s(7)
    assert pool.shares() == {"standby": 3}
    pool.come("active", 3)
    pool.pass_s(3)
    assert pool.shares() == {"standby": 0, "active": 3}


def test_without_a_quota_every_worker_is_taken_and_none_given_back() -> None:
    pool = SharedPool(2)
    pool.come("a", None)
    pool.pass_s(1)
    pool.come("b", None)
    pool.come("c", 2)
    pool.pass_s(10)
    assert pool.shares() == {"a": 2, "b": 0, "c": 0}


def test_shares_beyond_the_pool_leave_the_last_one_waiting() -> None:
    pool = SharedPool(2)
    pool.come("a", 2)
    pool.pass_s(1)
    pool.come("b", 2)
    pool.pass_s(10)
    assert pool.shares() == {"a": 2, "b": 0} and not pool.num_given_back


def test_a_quota_of_shards_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match="leave one of the two out, or give each scheduler"):
        SchedulerConfig(worker=("w:1",), worker_quota=1, shards=2)


@pytest.mark.parametrize("options", [{"worker_quota": -1}, {"worker_quota": 1, "shards": 2}, {"takeover_after": -1.0}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"worker_quota|takeover_after"):
        SchedulerConfig(**options)  # type: ignore[arg-type]  # any option


def test_workers_that_are_started_again_and_again_do_not_pile_up() -> None:
    for share in (None, 0):
        quota = WorkerQuota(share, AFTER_S, clock=lambda: 0.0)
        for life in range(2 * MAX_FREE):
            quota.refusal(worker_pb2.WorkerInfo(instance_id=str(life)), 0)
        assert len(quota._free_since_s) <= MAX_FREE
