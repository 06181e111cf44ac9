"""What a step and a decision cost the step loop, in calls: the same however many workers there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.scheduler.hand_turned_loop import Loop

NUM_FEW, NUM_MANY = 4, 64


def num_calls(work: Callable[[], None]) -> int:
    """Functions that were called, those of C among them."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Busy:
    """Workers whose slots are all taken, and groups that wait for each."""

    def __init__(self, num_workers: int, **settings: Any) -> None:
        self.now_ns = 1_000_000_000
        self.loop = Loop(clock=lambda: self.now_ns, **settings)
        self.links = [self.loop.join(f"worker {number}", max_num_seqs=2) for number in range(num_workers)]
        self._hear()
        for number in range(10 * num_workers):
            self._submit(f"request {number}", tenant=f"tenant {number % 3}")
        self.loop.turn()
        for _ in range(2):
            for link in self.links:
                self.loop.answer(link)
            self.loop.turn()

    def _hear(self) -> None:
        for link in self.links:
            link.last_heard_ns = self.now_ns

    def _submit(self, request_id: str, **options: Any) -> SequenceGroup:
        group = self.loop.group(request_id, num_tokens=17, **options)
        self.loop.engine.submit(group)
        return group

    def calls_of_a_step(self) -> int:
        """An answer comes and the next step is sent."""
        self.loop.answer(self.links[1])
        return self._calls_of_a_turn()

    def calls_of_a_decision(self) -> int:
        """A request comes, once everybody has been looked at who has made a step since the last one."""
        self._submit("one")
        self.loop.turn()
        self._submit("one more")
        return self._calls_of_a_turn()

    def _calls_of_a_turn(self) -> int:
        sent = sum(len(link.steps) for link in self.links)

        def turn() -> None:
            self.loop.engine.take_events(0)
            self.loop.engine.send_steps()

        calls = num_calls(turn)
        assert sum(len(link.steps) for link in self.links) <= sent + 1, "nobody else has got a step"
        return calls


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("what", [Busy.calls_of_a_step, Busy.calls_of_a_decision])
def test_it_does_not_grow_with_the_number_of_workers(what: Callable[[Busy], int], policy: str) -> None:
    few, many = (what(Busy(count, scheduling_policy=policy)) for count in (NUM_FEW, NUM_MANY))
    assert many < 1.25 * few + 20, (few, many)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_nobody_is_asked_to_give_way_where_nobody_ever_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be everybody that runs, in each step."""
    asked = []

    def overrules(waiting: SequenceGroup, running: SequenceGroup) -> bool:
        asked.append(running)
        return False

    monkeypatch.setitem(POLICIES, policy, replace(POLICIES[policy], overrules=overrules))
    Busy(NUM_FEW, scheduling_policy=policy).calls_of_a_step()
    assert not asked


def test_a_request_is_looked_up_once_for_all_workers() -> None:
    """Hashes, and workers that are measured anew, in one decision over workers that all have the prompt."""
    looks, measured = [], []
    for count in (NUM_FEW, NUM_MANY):
        busy = Busy(count)
        router = busy.loop.engine.router
        assert len(router.index), "everybody has the prompt, all being alike"
        busy._submit("one")
        busy.loop.turn()
        before = router.index.num_looks, router.loads.num_measured
        busy.loop.answer(busy.links[0])
        busy.loop.turn()
        busy._submit("another one")
        busy.loop.turn()
        looks.append(router.index.num_looks - before[0])
        measured.append(router.loads.num_measured - before[1])
    assert looks[0] == looks[1] <= 5 and measured[0] == measured[1] <= 2, (looks, measured)
