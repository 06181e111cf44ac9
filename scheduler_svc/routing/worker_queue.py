"""A worker's own queue as it is read while one step is filled: in order, without groups whose adapters have no room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler_svc.core.sequences.group_fault import GroupFault
from scheduler_svc.core.sequences.sequence import SequenceGroup

if TYPE_CHECKING:
    from scheduler_svc.leases.worker_handle import WorkerHandle
    from scheduler_svc.routing.router import Router

LOOK_AHEAD = 32  # groups, for one whose adapter finds room


class WorkerQueue:
    """A `Source` for one worker and one step.

    Attributes:
        taken: the groups that left the queue for the worker.
    """

    def __init__(self, router: Router, worker: WorkerHandle) -> None:
        self._router = router
        self._worker = worker
        self._is_shown = False
        self._shown: SequenceGroup | None = None
        self._looked_at: SequenceGroup | None = None
        self.taken: list[SequenceGroup] = []

    def peek(self) -> SequenceGroup | None:
        """The group that this worker should take next, if there is one; the same until it is removed.

        Raises GroupFault for a fault over one that waits, which changes nothing.
        """
        if not self._is_shown:
            self._is_shown = True
            self._shown = self._named(self._choose)
        return self._shown

    def peek_trial(self) -> SequenceGroup | None:
        """The same for those on trial."""
        return self._named(self._choose_trial)

    def remove(self, group: SequenceGroup) -> None:
        """The worker takes a group."""
        self.taken.append(group)
        self._worker.adapter_gate.admitted(group.adapter)
        self._is_shown = False
        self._router.begun(group)

    def earliest_arrival_ns(self) -> int | None:
        """Of the worker's whole queue, adapters or not."""
        return self._worker.waiting.earliest_arrival_ns()

    def _named(self, choose: Callable[[], SequenceGroup | None]) -> SequenceGroup | None:
        """What `choose` gives; a fault is that of the group that was looked at."""
        try:
            return choose()
        except Exception as error:
            if isinstance(error, GroupFault) or self._looked_at is None:
                raise
            raise GroupFault(self._looked_at, f"{type(error).__name__}: {error}") from error

    def _choose_trial(self) -> SequenceGroup | None:
        first = self._looked_at = self._worker.waiting.peek_trial()
        if first is None or not first.adapter:
            return first
        return self._first_admitted(self._worker.waiting.trials()[:LOOK_AHEAD])

    def _choose(self) -> SequenceGroup | None:
        head = self._looked_at = self._worker.waiting.peek()
        if head is None or not head.adapter:
            return head
        waiting, gate = self._worker.waiting, self._worker.adapter_gate
        groups = waiting.candidates(LOOK_AHEAD)
        found = self._first_admitted(groups)
        if found is not None or len(groups) < LOOK_AHEAD or not any(map(gate.may_admit, waiting.adapters())):
            return found
        # Many of an adapter without room hide nobody behind them: the gate, asked on in the same order, refuses them.
        behind = waiting.candidates(1, self._is_admitted)
        return behind[0] if behind else None

    def _is_admitted(self, group: SequenceGroup) -> bool:
        self._looked_at = group
        return self._worker.adapter_gate.admits(group.adapter)

    def _first_admitted(self, groups: list[SequenceGroup]) -> SequenceGroup | None:
        gate = self._worker.adapter_gate
        gate.open(adapters_in_use(self._worker), self._worker.adapters)
        for group in groups:
            self._looked_at = group
            if gate.admits(group.adapter):
                return group
        return None


def adapters_in_use(worker: WorkerHandle) -> set[str]:
    """Of all groups that the worker holds: preempted ones come back without asking."""
    if not worker.adapters:
        return set()
    return {group.adapter for group in worker.scheduler.groups.all()} - {""}
