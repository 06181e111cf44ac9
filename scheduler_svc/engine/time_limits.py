"""What happens by time alone: silent workers are lost, requests that waited too long end, idle workers are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.failures import Failures
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.placement import Placement
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.bound_queues import BoundQueues
from scheduler_svc.routing.rebinding import Rebinding
from scheduler_svc.routing.stranded_groups import StrandedGroups

log = structlog.get_logger()

CHECK_INTERVAL_NS = 10_000_000_000  # between two looks at the integrity of an idle worker's state
CHECK_SPACING_NS = 100_000_000  # between those at two workers: 64 of them together would hold up the loop for 0.2 s
STALL_NS = 1_000_000_000  # between two looks, when a quarter of it is the most
WATCH_INTERVAL_S = 0.25  # how often silence and deadlines are looked at when nothing else happens


@dataclass(slots=True)
class Watched:
    """When `watch` looked at what last, in nanoseconds."""

    at_ns: int
    all_ns: int  # workers
    awake_since_ns: int  # what they said before waits to be read
    checked_ns: int = 0  # the integrity of any worker's state


class TimeLimits:
    """`watch` is called whenever the step loop turns, at least every WATCH_INTERVAL_S; a caller who turns it
    himself may pause for longer.

    Attributes:
        turns_itself: the loop has a thread of its own, and a late turn tells of a process that was stopped.
    """

    def __init__(
        self,
        worker_wait_timeout_s: float,
        joined: JoinedWorkers,
        placement: Placement,
        failures: Failures,
        waiting: BoundQueues,
        stranded: StrandedGroups,
        rebinding: Rebinding,
        clock: Callable[[], int],
        recorder: NoRecorder,
    ) -> None:
        self.worker_wait_timeout_s = worker_wait_timeout_s
        self._joined = joined
        self._placement = placement
        self._failures = failures
        self._waiting = waiting
        self._stranded = stranded
        self._rebinding = rebinding
        self._clock = clock
        self._recorder = recorder
        self.turns_itself = False
        now_ns = clock()
        self.watched = Watched(now_ns, now_ns, now_ns)

    def watch(self) -> None:
        """Costs next to nothing while nothing is late."""
        now_ns = self._clock()
        if now_ns - self.watched.at_ns > STALL_NS:
            if self.turns_itself:
                seconds = round((now_ns - self.watched.at_ns) / 1e9, 1)
                log.warning("this process was stopped or starved", seconds=seconds)
            self.watched.awake_since_ns = now_ns  # what workers said meanwhile waits to be read
        self.watched.at_ns = now_ns
        for worker in self._workers_to_watch(now_ns):
            if (reason := worker.problem(now_ns, self.watched.awake_since_ns)) is not None:
                self._recorder.silent(worker)
                self._failures.lose(worker.link, reason)
        for worker in self._rebinding.look_at_late():
            self._joined.wake(worker)
        self._check_one_idle(now_ns)
        if self._joined.last_lost_ns is not None:
            self._time_out_waiting(now_ns, self._joined.last_lost_ns)
        timeout_s = self.worker_wait_timeout_s
        for group in self._stranded.overdue(now_ns - int(timeout_s * 1e9)):
            message = f"{self._stranded.why(group)}; no other came within {timeout_s:g} s (--worker-wait-timeout)"
            self._placement.end(group, FinishReason.ERROR, message)
        self._placement.failed.look(now_ns)

    def _workers_to_watch(self, now_ns: int) -> list[WorkerHandle]:
        """All a few times a second, and one in turn whenever the loop turns: a step costs the same however many there
        are. None of those waits for what nobody would have told the loop of."""
        if now_ns - self.watched.all_ns >= WATCH_INTERVAL_S * 1e9 or len(self._joined.workers) == 1:
            self.watched.all_ns = now_ns
            self._joined.due.update(dict.fromkeys(self._joined.workers))
            return list(self._joined.workers)
        worker = self._joined.next_in_turn()
        return [worker] if worker is not None else []

    def _check_one_idle(self, now_ns: int) -> None:
        """Looks at the integrity of one idle worker's state, which takes milliseconds, and then at none for a while."""
        if now_ns - self.watched.checked_ns < CHECK_SPACING_NS:
            return
        self.watched.checked_ns = now_ns  # also where nobody is due: the next look is as far away
        due = [each for each in self._joined.workers if each.is_idle and now_ns - each.checked_ns > CHECK_INTERVAL_NS]
        if not due:
            return
        worker = min(due, key=lambda each: each.checked_ns)
        worker.checked_ns = now_ns
        try:
            worker.check_integrity()
        except Exception as fault:
            self._failures.start_over(worker, fault, set())

    def _time_out_waiting(self, now_ns: int, last_lost_ns: int) -> None:
        """Each request has the whole time: from its arrival, or from the loss where it was there already."""
        timeout_s = self.worker_wait_timeout_s
        latest_ns = now_ns - int(timeout_s * 1e9)
        if last_lost_ns > latest_ns:
            return
        for group in self._waiting.unbound.arrived_until(latest_ns):
            message = f"all workers are lost, and none came back within {timeout_s:g} s (--worker-wait-timeout)"
            self._placement.end(group, FinishReason.ERROR, message)
