"""Which worker takes which waiting group: workers pull, and are shown what of the queue is best taken by them.

With one worker that is the queue in its order. With several a group goes to the worker that has the longest part of its
prompt cached, of equals to the one with the fewest tokens outstanding, of these to the one that took none for the
longest time, among those that could take it now: who answers sooner than others is not for that the first choice. A
worker looks a bounded window ahead for such groups. Knows nothing of clocks and sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from typing import Protocol

from scheduler_svc.adapter_gate import AdapterGate
from scheduler_svc.block_manager import AllocStatus
from scheduler_svc.group_fault import GroupFault
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.waiting_queue import WaitingQueue

LOOK_AHEAD = 32  # groups
MAX_PASSED_OVER = 16  # times that a group may see later ones taken first for their cached prefixes


class Taker(Protocol):
    """A worker as the dispatcher sees it."""

    scheduler: Scheduler
    adapter_gate: AdapterGate
    adapters: dict[str, int]  # loaded ones, with their generations
    took_last: int  # number of the group that it took last, of all that were taken; 0: none yet

    @property
    def takes_new_groups(self) -> bool: ...

    def can_ever_run(self, group: SequenceGroup) -> bool: ...


class Dispatcher:
    """Looks into the one waiting queue for all workers."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.waiting = waiting
        self._num_taken = itertools.count(1)

    def view(self, worker: Taker, workers: AbstractSequence[Taker]) -> WorkerView:
        """What `worker` is shown while it fills one step; `workers` are all that there are."""
        return WorkerView(self.waiting, worker, [other for other in workers if other is not worker], self._num_taken)


class WorkerView:
    """A `Source` for one worker and one step."""

    def __init__(self, waiting: WaitingQueue, worker: Taker, others: list[Taker], num_taken: Iterator[int]) -> None:
        self._waiting = waiting
        self._worker = worker
        self._others = others
        self._num_taken = num_taken
        self._known_rivals: list[tuple[Taker, int]] | None = None
        self._is_shown = False
        self._shown: SequenceGroup | None = None
        self._passed: list[SequenceGroup] = []  # that stand before it
        self._looked_at: SequenceGroup | None = None
        self.taken: list[SequenceGroup] = []

    def peek(self) -> SequenceGroup | None:
        """The group that this worker should take next, if there is one; the same until it is removed.

        Raises GroupFault for a fault over one that waits, which changes nothing.
        """
        if not self._is_shown:
            self._is_shown, self._passed = True, []
            try:
                self._shown = self._choose()
            except Exception as error:
                if isinstance(error, GroupFault) or self._looked_at is None:
                    raise
                raise GroupFault(self._looked_at, f"{type(error).__name__}: {error}") from error
        return self._shown

    def remove(self, group: SequenceGroup) -> bool:
        """The worker takes a group."""
        self.taken.append(group)
        for earlier in self._passed:
            earlier.num_passed_over += 1
        self._worker.adapter_gate.admitted(group.adapter)
        self._worker.took_last = next(self._num_taken)
        self._is_shown = False
        return self._waiting.remove(group)

    def earliest_arrival_ns(self) -> int | None:
        return self._waiting.earliest_arrival_ns()

    def _fits(self, group: SequenceGroup) -> bool:
        self._looked_at = group
        has_adapter = not group.adapter or group.adapter in self._worker.adapters
        return has_adapter and self._worker.can_ever_run(group)

    def _choose(self) -> SequenceGroup | None:
        head = self._looked_at = self._waiting.peek()
        if head is None:
            return None
        scheduler = self._worker.scheduler
        if not self._others and not head.adapter and self._worker.can_ever_run(head):
            return head
        gate = self._worker.adapter_gate
        gate.open(_adapters_in_use(self._worker), self._worker.adapters)
        if scheduler.groups.num_free_slots < 1:  # to be preempted for, if anything
            for first in self._waiting.candidates(1, self._fits):
                if gate.admits(first.adapter) and not any(_could_take(other, first) for other, _ in self._rivals()):
                    return first
            return None
        best: SequenceGroup | None = None
        best_cached, passed = -1, list[SequenceGroup]()
        for group in self._waiting.candidates(LOOK_AHEAD, self._fits):
            self._looked_at = group
            if not gate.admits(group.adapter):
                continue
            cached = _num_cached(self._worker, group) if self._others else 0
            if cached > best_cached and self._is_best_here(group, cached):
                best, best_cached, self._passed = group, cached, list(passed)
                if not self._others:
                    break  # in service order
            if group.num_passed_over >= MAX_PASSED_OVER:
                break  # nobody behind it may be taken first any more
            passed.append(group)
        return best

    def _is_best_here(self, group: SequenceGroup, num_cached: int) -> bool:
        """Whether no other worker that could take the group now has more of it cached, or less to do."""
        rivals = self._rivals()
        if not rivals:
            return True
        mine = (-num_cached, self._worker.scheduler.num_outstanding_tokens, self._worker.took_last)
        return not any(
            (-_num_cached(other, group), num_outstanding, other.took_last) < mine and _could_take(other, group)
            for other, num_outstanding in rivals
        )

    def _rivals(self) -> list[tuple[Taker, int]]:
        """The workers with a place for a new group, and their outstanding tokens."""
        if self._known_rivals is None:
            self._known_rivals = [
                (other, other.scheduler.num_outstanding_tokens)
                for other in self._others
                if other.takes_new_groups and other.scheduler.groups.num_free_slots > 0
            ]
        return self._known_rivals


def _adapters_in_use(worker: Taker) -> set[str]:
    """Of all groups that the worker holds: preempted ones come back without asking."""
    if not worker.adapters:
        return set()
    scheduler = worker.scheduler
    return {group.adapter for group in (*scheduler.running, *scheduler.swapped, *scheduler.preempted)} - {""}


def _could_take(worker: Taker, group: SequenceGroup) -> bool:
    """Whether the worker has room for a group at this moment."""
    scheduler = worker.scheduler
    return (
        worker.can_ever_run(group)
        and _has_room_for_adapter(worker, group.adapter)
        and scheduler.can_admit(group) is AllocStatus.OK
    )


def _has_room_for_adapter(worker: Taker, adapter: str) -> bool:
    if not adapter:
        return True
    in_use = _adapters_in_use(worker)
    return adapter in worker.adapters and (adapter in in_use or len(in_use) < worker.adapter_gate.max_loras)


def _num_cached(worker: Taker, group: SequenceGroup) -> int:
    """Blocks of the group's prompt that the worker has cached."""
    return len(worker.scheduler.blocks.find(group.sequences[0]))
