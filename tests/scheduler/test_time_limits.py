"""What time alone brings, by a clock that the test moves."""

from __future__ import annotations

from scheduler_svc.core.finish_reason import FinishReason
from scheduler_svc.engine.time_limits import STALL_NS, WATCH_INTERVAL_S
from tests.scheduler.hand_turned_loop import FakeLink, Loop

SECOND = 1_000_000_000


class Timed(Loop):
    def __init__(self, **settings: float) -> None:
        self.now_ns = 100 * SECOND
        super().__init__(clock=lambda: self.now_ns, **settings)

    def join_now(self, name: str) -> FakeLink:
        link = self.join(name)
        link.last_heard_ns = self.now_ns
        return link

    def pass_time(self, seconds: float, *heard: FakeLink) -> None:
        """In steps that no watchdog takes for a stall."""
        until_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < until_ns:
            self.now_ns = min(until_ns, self.now_ns + int(WATCH_INTERVAL_S * SECOND))
            for link in heard:
                link.last_heard_ns = self.now_ns
            self.engine.take_events(0)


def test_a_silent_worker_is_lost_and_one_that_is_heard_is_not() -> None:
    loop = Timed()
    silent, heard = loop.join_now("silent"), loop.join_now("heard")
    loop.turn()
    loop.pass_time(60, heard)
    assert silent.is_closed and not heard.is_closed and len(loop.engine.workers) == 1


def test_a_process_that_stood_still_blames_no_worker() -> None:
    loop = Timed()
    link = loop.join_now("worker")
    loop.turn()
    loop.now_ns += 600 * SECOND + STALL_NS
    loop.engine.take_events(0)
    assert not link.is_closed, "what it said meanwhile waits to be read"
    loop.pass_time(60)
    assert link.is_closed


def test_with_all_workers_lost_each_request_waits_as_long_as_it_may() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    link = loop.join_now("worker")
    loop.turn()
    early = loop.group("early")
    early.arrival_ns = loop.now_ns - 1000 * SECOND
    loop.engine.submit(early)
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    loop.pass_time(20)
    late = loop.group("late")
    late.arrival_ns = loop.now_ns
    loop.engine.submit(late)
    loop.turn()
    loop.pass_time(9)
    assert not loop.ends, "it has the whole time from the loss"
    loop.pass_time(2)
    assert loop.ends.keys() == {"early"}
    assert loop.ends["early"][0] is FinishReason.ERROR and "within 30 s" in loop.ends["early"][1]
    loop.pass_time(20)
    assert loop.ends.keys() == {"early", "late"}


def test_what_no_worker_can_hold_ends_after_the_same_time() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    link = loop.join_now("small")
    loop.turn()
    loop.engine.submit(loop.group("large", num_tokens=500))
    loop.turn()
    loop.pass_time(29, link)
    assert not loop.ends
    loop.pass_time(2, link)
    assert "no other came within 30 s" in loop.ends["large"][1] and not link.is_closed
