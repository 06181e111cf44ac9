"""Tenants that have left are forgotten: memory and steps do not grow with names, and nobody gains by it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from scheduler_svc.core.queues import served_tokens
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import MAX_REMEMBERED, ServedTokens
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.many import trials, without_end
from tests.scheduler.simulation import Simulation

_numbers = itertools.count()


def _group(tenant: str) -> SequenceGroup:
    name = f"r{next(_numbers)}"
    return SequenceGroup(name, [1] * 5, pb.SamplingParams(), max_num_tokens=9, arrival_ns=0, tenant=tenant)


@without_end
@settings(max_examples=trials(60))
@given(data=st.data())
def test_no_tenant_gains_by_being_forgotten(data: Any):
    """Levels never fall, and nobody's rises while it waits, but by what it is charged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_tokens, "MIN_REMEMBERED", 4)
        patch.setattr(served_tokens, "MAX_REMEMBERED", 6)
        served = ServedTokens()
        served._look_at = 4
        queue = WaitingQueue(POLICIES["fair"], served)
        levels: dict[str, float] = {}
        most_waiting = 0
        for _ in range(data.draw(st.integers(1, 60))):
            waiting = set(queue._lanes)
            names = st.sampled_from(sorted(levels)) if levels else st.nothing()
            tenant = data.draw(names | st.text("abcdefghij", min_size=2, max_size=2))
            match data.draw(st.sampled_from(["push", "push", "pop", "charge"])):
                case "push":
                    queue.push(_group(tenant))
                    raised = {tenant}
                    most_waiting = max(most_waiting, len(queue._lanes))
                    if tenant not in waiting:  # all are looked at; no more were left last time than waited, and 6
                        assert len(served) <= 2 * (most_waiting + 6)
                case "pop" if len(queue):
                    raised = {queue.pop().tenant}
                    served.charge(next(iter(raised)), data.draw(st.integers(1, 9)))
                case _:
                    served.charge(tenant, data.draw(st.integers(1, 9)))
                    raised = {tenant}
            levels.setdefault(tenant, 0.0)
            for name, before in levels.items():
                after = served.level(name)
                assert after >= before, "it has gained"
                assert after == before or name in raised or name not in waiting, "it was raised while it waits"
                levels[name] = after
            queue.check_integrity()


def test_a_million_tenants_beside_one_that_is_always_behind():
    """A tenant of great weight keeps the floor where it is, however many others come and go above it."""
    served = ServedTokens({"heavy": 1e9})
    queue = WaitingQueue(POLICIES["fair"], served)
    waits = _group("heavy")
    queue.push(waits)
    for number in range(3 * MAX_REMEMBERED):
        group = _group(f"tenant {number}")
        queue.push(group)
        queue.remove(group)
        served.charge(group.tenant, 10)
        assert len(served) <= 2 * MAX_REMEMBERED
    assert queue.peek() is waits and served.level("heavy") == 0
    assert served.level("tenant 0") >= 10


def test_numbers_of_tenants_that_have_left_are_used_again():
    """What a step counts by tenant is as long as there are slots, whoever was here before."""
    simulation = Simulation(policy="fair", served=ServedTokens(), num_slots=4)
    for number in range(200):
        simulation.add([1, 2, 3], 2, tenant=f"tenant {number}", eos_token_id=None)
    while simulation.in_flight or not all(group.is_finished for group in simulation.groups):
        while simulation.send():
            pass
        simulation.answer()
        groups = simulation.scheduler.groups
        assert len(groups.tenants) <= 2 * 4
        for group in groups.running:
            for sequence in group.unfinished():
                assert groups.tenants[simulation.columns.tenant[sequence.slot]] == group.tenant
    simulation.check_outputs()


def test_of_too_many_tenants_the_least_served_that_do_not_wait_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tokens, "MIN_REMEMBERED", 4)
    monkeypatch.setattr(served_tokens, "MAX_REMEMBERED", 4)
    served = ServedTokens()
    for number in range(1, 9):
        served.charge(str(number), 10 * number)
    served.lift("new", 0, waiting={"1", "2", "nobody"})
    assert len(served) == 3 + 3 and [served.level(str(number)) for number in (1, 2, 6, 7, 8)] == [10, 20, 60, 70, 80]
    assert [served.level(name) for name in ("3", "4", "5", "another")] == [50] * 4 and served.level("nobody") == 0
    served.lift("3", 55)
    assert [served.level(name) for name in ("3", "6", "another")] == [55, 60, 55]
