"""Waiting groups that no worker there is can hold, and since when: of a pool's sizes the large one may be away.

They stand in nobody's way meanwhile (`Dispatcher`), and wait for as long as requests do when all workers are lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.waiting_queue import WaitingQueue
from scheduler_svc.worker_handle import WorkerHandle


class StrandedGroups:
    """To be told of every change: `look` at all that wait when a worker joins or goes, else at those that come."""

    def __init__(self, waiting: WaitingQueue, workers: list[WorkerHandle]) -> None:
        self._waiting = waiting
        self._workers = workers
        self._since_ns: dict[SequenceGroup, int] = {}

    def look(self, groups: Iterable[SequenceGroup], now_ns: int) -> None:
        """Notes which of `groups` nobody can hold. Without any worker nobody is stranded anew."""
        for group in groups:
            if any(Dispatcher.can_ever_run(group, worker) for worker in self._workers):
                self._since_ns.pop(group, None)
            elif self._workers:
                self._since_ns.setdefault(group, now_ns)

    def overdue(self, latest_ns: int) -> list[SequenceGroup]:
        """Those that have been stranded since `latest_ns` or before, and wait still, while there are workers."""
        if not self._since_ns or not self._workers:
            return []
        self._since_ns = {group: since_ns for group, since_ns in self._since_ns.items() if group in self._waiting}
        return [group for group, since_ns in self._since_ns.items() if since_ns <= latest_ns]

    def why(self, group: SequenceGroup) -> str:
        """What it needs and what there is, in numbers. Only while there are workers."""
        schedulers = [worker.scheduler for worker in self._workers]
        wanted = schedulers[0].blocks.num_blocks_of(group)
        most = max(scheduler.blocks.allocator.num_blocks for scheduler in schedulers)
        lengths = max(scheduler.columns.max_model_len for scheduler in schedulers)
        slots = max(scheduler.columns.max_num_seqs for scheduler in schedulers)
        return (
            f"it holds {wanted} cache blocks, may reach {group.max_num_tokens} tokens and needs {group.num_slots} "
            f"slots; the workers that are left have at most {most} blocks, {lengths} tokens and {slots} slots"
        )
