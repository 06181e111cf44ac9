"""Who is joined, and who has something to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.errors import UnknownName
from tests.scheduler.hand_turned_loop import FakeLink


@dataclass(eq=False)
class Handle:
    """All that is known of a worker here."""

    link: FakeLink
    is_finishing: bool = False


def joined(*addresses: str) -> tuple[JoinedWorkers, list[Any]]:
    workers = JoinedWorkers()
    handles: list[Any] = [Handle(FakeLink(address)) for address in addresses]
    for handle in handles:
        workers.add(handle)
    return workers, handles


def test_a_worker_is_found_by_its_stream_until_it_is_removed() -> None:
    workers, (first, second) = joined("a:1", "b:1")
    assert workers.has(second) and workers.of(first.link) == first
    workers.wake(first)
    workers.idle[first] = None
    workers.remove(first)
    assert workers.of(first.link) is None and not workers.has(first)
    assert workers.workers == [second] and not workers.due and not workers.idle
    assert workers.of(FakeLink("b:1")) is None, "another stream to the same address is another worker"


def test_who_finishes_looks_again_when_another_is_lost() -> None:
    workers, (first, second, third) = joined("a:1", "b:1", "c:1")
    second.is_finishing = True
    workers.remove(third)
    assert list(workers.take_due()) == [second], "it may have waited for what that one still had"
    assert workers.workers == [first, second]


def test_who_is_due_is_taken_once() -> None:
    workers, (first, second) = joined("a:1", "b:1")
    for worker in (second, first, second):
        workers.wake(worker)
    assert list(workers.take_due()) == [second, first] and not workers.take_due()


def test_idle_workers_are_woken_in_turn() -> None:
    workers, handles = joined("a:1", "b:1", "c:1")
    workers.idle.update(dict.fromkeys(handles))
    woken: list[Any] = []
    for _ in range(4):
        workers.wake_next_idle()
        woken += workers.take_due()
    assert woken == [*handles, handles[0]]


def test_turns_go_round_and_skip_who_was_lost() -> None:
    workers, (first, second, third) = joined("a:1", "b:1", "c:1")
    assert [workers.next_in_turn() for _ in range(4)] == [first, second, third, first]
    workers.remove(second)
    assert {workers.next_in_turn() for _ in range(2)} == {first, third}
    workers.close()
    assert workers.next_in_turn() is None and first.link.is_closed and third.link.is_closed


def test_workers_by_address() -> None:
    workers, (first, second) = joined("a:1", "b:1")
    assert workers.at("b:1") == [second] and workers.at("") == [first, second]
    with pytest.raises(UnknownName, match="no worker 'x:1'; there are: a:1, b:1"):
        workers.at("x:1")
