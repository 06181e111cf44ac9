"""Workers that are killed, stopped, cut off and restarted at the worst moments: nobody's tokens change.

32 requests run on two workers when a fault strikes one of them, at a message of its step stream that a proxy waits for.
Every answer has to be that of a run in which nothing happened; streams are checked message by message.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.moments import HALF_HELD_STOP_STRING, MOMENTS, Strike
from tests.chaos.recovery_times import RECOVERIES, Recovery, wait_s
from tests.chaos.step_proxy import StepProxy
from tests.chaos.workload import Received, Work, assert_same, make_work, run_requests

NUM_WORKLOADS = 4
NUM_SEEDS = 20


@pytest.fixture(scope="module")
def works() -> dict[int, Work]:
    return {}


def work_of(number: int, works: dict[int, Work], cluster: Cluster) -> Work:
    if number not in works:
        cluster.wait_until_whole()
        works[number] = cluster.run(make_work(cluster.address, number))
    return works[number]


class Outcome:
    """A run with a fault in it."""

    def __init__(self) -> None:
        self.struck_s = 0.0
        self.held: set[str] = set()  # requests of the worker at that moment
        self.received: dict[str, Received] = {}

    @property
    def waits_s(self) -> list[float]:
        """Of the requests that were streaming from the worker and went on elsewhere."""
        moved = (one for name, one in self.received.items() if name in self.held and one.times_moved)
        return [wait for one in moved if (wait := wait_s(one, self.struck_s)) is not None]


async def run_with(cluster: Cluster, work: Work, fault: Fault, moment: str, numbers: random.Random) -> Outcome:
    """Strikes at one of the first such moments of a run; at the very first of the next run if there are not so many."""
    outcome = Outcome()
    healing: list[asyncio.Task[None]] = []

    def strike(proxy: StepProxy) -> None:
        place = next(place for place in cluster.places if place.steps is proxy)
        outcome.struck_s, outcome.held = time.monotonic(), proxy.tracker.request_ids
        fault.strike(place)
        healing.append(asyncio.create_task(fault.heal(cluster, place)))

    half_held = numbers.choice(work.half_held) if moment == HALF_HELD_STOP_STRING else None
    is_after = numbers.random() < 0.5
    for skip in (numbers.randrange(8), 0):
        cluster.watch(Strike(moment, strike, skip, is_after, half_held))
        outcome.received = await run_requests(cluster.address, work.requests)
        cluster.watch(None)
        if healing:
            await healing[0]
            return outcome
        assert_same(outcome.received, work.undisturbed)
    raise AssertionError(f"{moment}: never seen")


def check(cluster: Cluster, works: dict[int, Work], fault: str, moment: str, seed: int) -> None:
    numbers = random.Random(f"{fault}, {moment}, {seed}")
    work = work_of(seed % NUM_WORKLOADS, works, cluster)
    cluster.wait_until_whole()
    outcome = cluster.run(run_with(cluster, work, FAULTS[fault], moment, numbers))
    assert_same(outcome.received, work.undisturbed)
    assert any(one.times_moved for one in outcome.received.values()), "the fault was meant to interrupt somebody"
    RECOVERIES.append(Recovery(fault, moment, outcome.waits_s))
    cluster.wait_until_whole()
    assert_nothing_is_left(cluster)


def assert_nothing_is_left(cluster: Cluster) -> None:
    """No block is in use, and the step loop met nothing that it did not expect."""
    assert not cluster.scheduler.blocks_in_use(), "blocks are in use, and nobody is there"
    for broken in ("the step loop failed over a worker", "an event of the step loop failed", "worker client failed"):
        for event in cluster.scheduler.events(broken):
            raise AssertionError(f"{broken}: {event}")


@pytest.mark.parametrize(("fault", "moment"), list(zip(FAULTS, MOMENTS, strict=True)))
def test_a_fault_at_a_bad_moment_changes_no_answer(cluster, works, fault, moment):
    check(cluster, works, fault, moment, seed=0)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_at_any_bad_moment_changes_an_answer(cluster, works, fault, moment, seed):
    check(cluster, works, fault, moment, seed)
