"""Waiting groups that none of the present workers can hold, and since when.

The only large worker of a pool may be away, or all workers of a model, or all that could load an adapter. Such groups
stand in nobody's way, and wait as long as requests do when all workers are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.leases.worker_handle import WorkerHandle

MIN_GONE = 64  # that may have left the queue and are still noted


class StrandedGroups:
    """To be told of every change: `look` at all that wait when a worker joins or goes, else at those that come."""

    def __init__(self, waiting: WaitingQueue, workers: list[WorkerHandle]) -> None:
        self._waiting = waiting
        self._workers = workers
        self._since_ns: dict[SequenceGroup, int] = {}

    def look(self, groups: Iterable[SequenceGroup], now_ns: int) -> None:
        """Notes which of `groups` nobody can hold. Without any worker nobody is stranded anew."""
        for group in groups:
            if any(_can_hold(worker, group) for worker in self._workers):
                self._since_ns.pop(group, None)
            elif self._workers:
                self._since_ns.setdefault(group, now_ns)

    def overdue(self, latest_ns: int) -> list[SequenceGroup]:
        """Those that have been stranded since `latest_ns` or before, and wait still, while there are workers.

        Asked after every step: looks at who is due, and at all only where most of them wait no more.
        """
        if not self._since_ns or not self._workers:
            return []
        if len(self._since_ns) > 2 * len(self._waiting) + MIN_GONE:
            self._since_ns = {group: since_ns for group, since_ns in self._since_ns.items() if group in self._waiting}
        # In the order in which they were noted, so who is due stands first.
        entries = itertools.takewhile(lambda entry: entry[1] <= latest_ns, self._since_ns.items())
        due = [group for group, _ in entries]
        overdue = [group for group in due if group in self._waiting]
        for group in due:
            del self._since_ns[group]
        return overdue

    def found(self, group: SequenceGroup) -> None:
        """A worker has it after all."""
        self._since_ns.pop(group, None)

    def why(self, group: SequenceGroup) -> str:
        """What it needs and what there is, in numbers. Only while there are workers."""
        of_model = [worker for worker in self._workers if not group.model or worker.model in ("", group.model)]
        if not of_model:
            return "none of the workers that are left serves its model"
        if any(_could_hold(worker, group) for worker in of_model):
            return "the workers that could hold it are drained, and take no new requests"
        if group.adapter and any(worker.scheduler.can_ever_run(group) for worker in of_model):
            return f"none of the workers that are left has loaded adapter {group.adapter!r}"
        schedulers = [worker.scheduler for worker in of_model]
        wanted = schedulers[0].blocks.num_blocks_of(group)
        most = max(scheduler.blocks.allocator.num_usable for scheduler in schedulers)
        lengths = max(scheduler.columns.max_model_len for scheduler in schedulers)
        slots = max(scheduler.columns.max_num_seqs for scheduler in schedulers)
        return (
            f"it holds {wanted} cache blocks, may reach {group.max_num_tokens} tokens and needs {group.num_slots} "
            f"slots; the workers that are left have at most {most} blocks, {lengths} tokens and {slots} slots"
        )


def _can_hold(worker: WorkerHandle, group: SequenceGroup) -> bool:
    """One that ends what it has, and then leaves, takes nobody who waits for a worker."""
    return not worker.is_closing and _could_hold(worker, group)


def _could_hold(worker: WorkerHandle, group: SequenceGroup) -> bool:
    """One that is still loading the group's adapter, or could not, is none: whoever loads it has such groups placed."""
    return worker.can_ever_run(group) and (not group.adapter or group.adapter in worker.adapters)
