"""Where requests go, and that one which ends is out of every place that knew it."""

from __future__ import annotations

import pytest

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.routing.router import Router
from tests.scheduler.hand_turned_loop import Loop


def placed(loop: Loop, request_id: str, num_tokens: int = 3) -> SequenceGroup:
    group = loop.group(request_id, num_tokens)
    loop.engine.submit(group)
    loop.turn()
    return group


def test_what_ends_is_told_once_and_its_id_is_free_at_once() -> None:
    loop = Loop()
    loop.join()
    group = placed(loop, "one")
    for message in ("first", "again"):
        loop.engine._placement.end(group, FinishReason.ERROR, message)
    assert loop.ends == {"one": (FinishReason.ERROR, "first")}
    assert group.is_finished and loop.engine.num_live == 0 and loop.engine.router.worker_of(group) is None
    loop.engine.submit(loop.group("one"))


def test_a_request_that_brings_a_fault_along_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    loop.join()
    place = Router.place

    def fail_over_one(router: Router, group: SequenceGroup) -> object:
        if group.request_id == "bad":
            raise ZeroDivisionError
        return place(router, group)

    monkeypatch.setattr(Router, "place", fail_over_one)
    for request_id in ("bad", "good"):
        placed(loop, request_id)
    assert loop.ends == {"bad": (FinishReason.ERROR, "the scheduler failed over it: ZeroDivisionError")}
    assert [group.request_id for group in loop.engine.live_groups()] == ["good"]


def test_what_moves_goes_back_to_a_worker_that_only_finishes_where_nobody_else_can_take_it() -> None:
    loop = Loop()
    loop.join("finishes")
    group = placed(loop, "one")
    (worker,) = loop.engine.workers
    loop.engine.drain_worker(worker, may_finish=True)
    waits = placed(loop, "new")
    assert loop.engine.router.worker_of(waits) is None, "it takes nobody who is new"
    worker.scheduler.evacuate()
    loop.engine._placement.move(group)
    assert loop.engine.router.worker_of(group) is worker and group.num_moves == 1


def test_of_workers_told_to_end_together_the_last_waits_for_what_the_others_have() -> None:
    loop = Loop()
    first = loop.join("first")
    group = placed(loop, "one")
    last = loop.join("last")
    loop.turn()
    for worker in list(loop.engine.workers):
        loop.engine.drain_worker(worker, may_finish=True)
    loop.turn()
    assert [worker.link for worker in loop.engine.workers] == [first, last], "the step of the first is on its way"
    for _ in list(loop.engine.workers[0].in_flight):
        loop.answer(first)
        loop.turn()
    (worker,) = loop.engine.workers
    assert worker.link is last and loop.engine.router.worker_of(group) is worker
    loop.engine.abort("one")
    loop.turn()
    for _ in list(worker.in_flight):
        loop.answer(last)
        loop.turn()
    assert loop.engine.workers == [], "it goes once it has nothing more"


def test_where_one_output_of_a_request_ends_the_others_go_on() -> None:
    loop = Loop()
    loop.join()
    group = loop.group("two", num_outputs=2)
    loop.engine.submit(group)
    loop.turn()
    first, second = group.sequences
    loop.engine._placement.finish_sequence(first)
    assert group.unfinished() == [second] and loop.engine.live_groups() == [group]
    loop.engine._placement.finish_sequence(second)
    assert group.is_finished and not loop.engine.live_groups()
