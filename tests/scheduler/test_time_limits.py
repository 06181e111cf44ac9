"""What time alone brings, by a clock that the test moves."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.failed_requests import MAX_IDS
from scheduler_svc.engine.time_limits import STALL_NS, WATCH_INTERVAL_S
from tests.scheduler.hand_turned_loop import FakeLink, Loop

SECOND = 1_000_000_000


class Timed(Loop):
    def __init__(self, **settings: float) -> None:
        self.now_ns = 100 * SECOND
        super().__init__(clock=lambda: self.now_ns, **settings)

    def join_now(self, name: str, epoch: int = 1, max_loras: int = 0, model: str = "") -> FakeLink:
        link = self.join(name, epoch, max_loras=max_loras, model=model)
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


@pytest.mark.parametrize("turns_itself", [False, True])
def test_a_caller_who_turns_the_loop_may_pause(turns_itself: bool) -> None:
    loop = Timed()
    loop.engine._time_limits.turns_itself = turns_itself
    with structlog.testing.capture_logs() as lines:
        loop.now_ns += 2 * STALL_NS
        loop.engine.take_events(0)
    assert [line["event"] for line in lines] == ["this process was stopped or starved"] * turns_itself


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


def test_requests_that_a_time_limit_ends_are_lines_of_the_log_one_a_second_at_most() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    link = loop.join_now("worker")
    loop.turn()
    loop.submit(*[f"r{number:03}" for number in range(300)])
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    loop.pass_time(28)
    for number in range(4):  # one a turn, whose time is over in four turns one after the other
        late = loop.group(f"late{number}")
        late.arrival_ns = loop.now_ns
        loop.engine.submit(late)
        loop.pass_time(WATCH_INTERVAL_S)
    with capture_logs() as lines:
        loop.pass_time(40)
    assert len(loop.ends) == 304
    ended = [line for line in lines if line["event"] == "requests ended with an error"]
    assert [line["requests"] for line in ended] == [300, 1, 3]
    assert [len(line["first"]) for line in ended] == [MAX_IDS, 1, 3] and ended[1]["first"] == ["late0"]
    why = "all workers are lost, and none came back within 30 s (--worker-wait-timeout)"
    assert {(line["why"], line["log_level"]) for line in ended} == {(why, "warning")}


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


@pytest.mark.parametrize("may_finish", [True, False])
def test_what_comes_while_its_only_worker_is_drained_ends_after_the_same_time(may_finish: bool) -> None:
    """However long that one goes on with what it has."""
    loop = Timed(worker_wait_timeout_s=30.0)
    link = loop.join_now("drained")
    loop.submit("runs")
    loop.turn()
    loop.engine.drain_worker(loop.engine.workers[0], may_finish=may_finish)
    loop.submit("new")
    loop.turn()
    loop.pass_time(29, link)
    assert not loop.ends
    loop.pass_time(2, link)
    assert loop.ends.keys() == {"new"} and not link.is_closed
    assert "that could hold it are drained, and take no new requests; no other came within 30 s" in loop.ends["new"][1]


def test_what_a_worker_that_finishes_took_back_has_the_whole_time_once_that_one_is_lost() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    finishes, other = loop.join_now("finishes", model="a"), loop.join_now("other", model="b")
    loop.engine.submit(loop.group("one", model="a"))
    loop.turn()
    worker = loop.engine.workers[0]
    loop.engine.drain_worker(worker, may_finish=True)
    loop.engine._failures.start_over(worker, RuntimeError("ours"), set())
    loop.pass_time(20, finishes, other)
    loop.engine.worker_lost(finishes, "gone")
    loop.pass_time(29, other)
    assert not loop.ends
    loop.pass_time(2, other)
    assert "none of the workers that are left serves its model" in loop.ends["one"][1]


def test_what_found_a_worker_has_the_whole_time_once_that_one_is_lost() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    first = loop.join_now("first", max_loras=1)
    loop.engine.load_adapter("a", "/adapters/a")
    loop.turn()
    first.calls.pop()[1]("")
    loop.turn()
    loop.engine.worker_lost(first, "gone")
    plain, second = loop.join_now("plain", epoch=2), loop.join_now("second", epoch=3, max_loras=1)
    loop.engine.submit(loop.group("one", adapter="a"))
    loop.pass_time(20, plain, second)
    second.calls.pop()[1]("")
    loop.turn()
    loop.engine.worker_lost(second, "gone")
    loop.pass_time(28, plain)
    assert not loop.ends
    loop.pass_time(4, plain)
    assert "none of the workers that are left has loaded adapter 'a'" in loop.ends["one"][1]


def test_a_request_whose_adapter_nobody_can_load_any_more_is_told_so_and_does_not_keep_it() -> None:
    """Its folder may be gone when the worker that comes for a lost one looks for it."""
    loop = Timed(worker_wait_timeout_s=30.0)
    first = loop.join_now("first", max_loras=1)
    loading = loop.engine.load_adapter("a", "/adapters/a")
    loop.turn()
    first.calls.pop()[1]("")
    loop.turn()
    assert loading.result(0) == 1
    loop.engine.worker_lost(first, "gone")
    second = loop.join_now("second", epoch=2, max_loras=1)
    loop.turn()
    loop.engine.submit(loop.group("early", adapter="a"))
    loop.turn()
    second.calls.pop()[1]("adapter folder /adapters/a does not exist")
    loop.engine.submit(loop.group("late", adapter="a"))
    unloading = loop.engine.unload_adapter("a")
    loop.turn()
    loop.pass_time(29, second)
    assert not loop.ends and not unloading.done()
    loop.pass_time(2, second)
    why = "none of the workers that are left has loaded adapter 'a'; no other came within 30 s (--worker-wait-timeout)"
    assert {request_id: message for request_id, (_, message) in loop.ends.items()} == {"early": why, "late": why}
    assert unloading.result(0) == 1


def test_a_request_waits_no_longer_than_its_adapter_takes_to_load() -> None:
    loop = Timed(worker_wait_timeout_s=30.0)
    link = loop.join_now("worker", max_loras=1)
    loop.engine.load_adapter("a", "/adapters/a")
    loop.turn()
    link.calls.pop()[1]("")
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    link = loop.join_now("again", epoch=2, max_loras=1)
    loop.engine.submit(loop.group("one", adapter="a"))
    loop.turn()
    loop.pass_time(20, link)
    assert not link.steps
    link.calls.pop()[1]("")
    loop.turn()
    assert link.steps[0].groups[0].request_id == "one"
    loop.pass_time(0.5, link)
    assert not loop.ends
