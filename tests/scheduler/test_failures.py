"""What a lost worker and a fault of our own cost."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.group_fault import GroupFault
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.failures import LOSSES_IN_ALL, MAX_FAULTS_IN_A_ROW
from tests.scheduler.hand_turned_loop import FakeLink, Loop


def at_work(*request_ids: str, **settings: Any) -> tuple[Loop, FakeLink]:
    """A worker with requests in flight."""
    loop = Loop(**settings)
    link = loop.join()
    loop.submit(*request_ids)
    loop.turn()
    return loop, link


def losses(loop: Loop) -> dict[str, int]:
    return {group.request_id: group.num_worker_losses for group in loop.engine.live_groups()}


def test_a_lost_worker_is_charged_to_whose_steps_were_in_flight_and_to_nobody_else() -> None:
    loop, link = at_work("one", "two", "three", "four", "waits")
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    assert losses(loop) == {"one": 1, "two": 1, "three": 1, "four": 1, "waits": 0} and link.is_closed
    assert loop.engine.num_waiting == 5 and loop.engine.metrics.total().num_worker_losses == 1


def test_one_that_was_told_to_go_costs_nobody_anything() -> None:
    loop, link = at_work("one")
    loop.drain("worker")
    loop.engine.worker_lost(link, "gone before it answered")
    loop.turn()
    assert losses(loop) == {"one": 0} and loop.engine.metrics.total().num_worker_losses == 0


def test_a_fault_over_adapters_keeps_no_request_at_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, link = at_work("one", "two", "three", "four", "waits")

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(Adapters, "worker_left", fail)
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    assert loop.engine.num_waiting == 5 and link.is_closed
    loop.run_to_end(loop.join("next"))
    assert all(tokens == [7] * 9 for tokens in loop.token_ids.values()) and len(loop.token_ids) == 5


def test_who_was_charged_too_often_ends_with_the_number() -> None:
    loop, link = at_work("one", max_worker_losses=2)
    with capture_logs() as lines:
        for _ in range(2):
            loop.engine.worker_lost(link, "gone")
            link = loop.join()
            loop.turn()
    why = "2 workers were lost while running it"
    assert loop.ends == {"one": (FinishReason.ERROR, why)}
    line = {"event": "requests ended with an error", "requests": 1, "first": ["one"], "why": why}
    assert lines[-1] == {**line, "log_level": "warning"}


def test_an_error_at_the_very_end_is_in_the_log_before_the_loop_stops() -> None:
    loop, _ = at_work("one", "two")
    groups = loop.engine.live_groups()
    with capture_logs() as lines:
        loop.engine._placement.end(groups[0], FinishReason.ERROR, "first")
        loop.turn()
        loop.engine._placement.end(groups[1], FinishReason.ERROR, "second, within the same second")
        loop.engine.stop()
    assert [line["first"] for line in lines if line["event"] == "requests ended with an error"] == [["one"], ["two"]]


def test_who_was_there_at_every_loss_ends_whatever_trials_it_has_passed() -> None:
    loop, link = at_work("one", max_worker_losses=2)
    num_lost = 0
    while not loop.ends:
        (group,) = loop.engine.live_groups()
        for sequence in group.sequences:
            sequence.trial_ends_at = 0  # it has passed
        loop.engine.worker_lost(link, "gone")
        link, num_lost = loop.join(), num_lost + 1
        loop.turn()
    assert num_lost == LOSSES_IN_ALL * 2


def test_a_fault_that_names_a_request_is_charged_to_that_one_and_the_worker_stays() -> None:
    loop, link = at_work("bad", "good")
    (worker,) = loop.engine.workers
    bad = loop.engine.find("bad")[0]
    loop.engine._failures.start_over(worker, GroupFault(bad, "a fault over it"), worker.scheduler.groups_at_work())
    assert losses(loop) == {"bad": 1, "good": 0}
    assert loop.engine.workers == [worker] and not link.is_closed and worker.num_faults == 1
    loop.run_to_end(link)
    assert loop.token_ids == {"bad": [7] * 9, "good": [7] * 9}


def test_after_many_faults_in_a_row_it_may_be_the_worker_after_all() -> None:
    loop, link = at_work("one", max_worker_losses=1000)
    (worker,) = loop.engine.workers
    for number in range(MAX_FAULTS_IN_A_ROW + 1):
        assert not link.is_closed, number
        loop.engine._failures.start_over(worker, RuntimeError("ours"), set())
    assert link.is_closed and not loop.engine.workers and losses(loop).keys() == {"one"}
