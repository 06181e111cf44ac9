"""The workers that have joined, by their streams, and which of them have something to do."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import UnknownName
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink


class JoinedWorkers:
    """Changed by the step loop alone.

    Attributes:
        workers: all, in the order in which they came.
        due: something has happened that a step may come of.
        idle: nothing in flight, in turn for what others have to spare.
        last_lost_ns: when the last one was lost, while there is none.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerHandle] = []
        self.due: dict[WorkerHandle, None] = {}
        self.idle: dict[WorkerHandle, None] = {}
        self.last_lost_ns: int | None = None
        self._by_link: dict[int, WorkerHandle] = {}  # by `id`
        self._turns: Iterator[WorkerHandle] = iter(())

    def add(self, worker: WorkerHandle) -> None:
        """A worker whose lease has been granted."""
        self.workers.append(worker)
        self._by_link[id(worker.link)] = worker

    def find_links(self) -> None:
        """`workers` was given from elsewhere: each is found by its link from now on."""
        self._by_link = {id(worker.link): worker for worker in self.workers}

    def remove(self, worker: WorkerHandle) -> None:
        """A worker that is lost; nothing here knows it any more."""
        self.workers.remove(worker)
        del self._by_link[id(worker.link)]
        self.due.pop(worker, None)
        self.idle.pop(worker, None)
        self._turns = iter(())  # which may hold it, and all that is known of it
        for other in self.workers:
            if other.is_finishing:  # perhaps for what this one still had
                self.wake(other)

    def has_all_it_will_finish(self, worker: WorkerHandle) -> bool:
        """Whether a worker that only finishes will get nothing more: no other of its model is leaving with requests."""
        return not any(
            other.is_leaving and other.model == worker.model and other.scheduler.groups.all() for other in self.workers
        )

    def close(self) -> None:
        """Closes every stream."""
        for worker in self.workers:
            worker.link.close()
        self.workers.clear()
        self._by_link.clear()
        self.due.clear()
        self.idle.clear()

    def wake(self, worker: WorkerHandle) -> None:
        """The loop is to look at it before it waits again."""
        self.due[worker] = None

    def wake_next_idle(self) -> None:
        """The idle worker whose turn it is looks for something to do; there must be one."""
        worker = next(iter(self.idle))
        del self.idle[worker]
        self.idle[worker] = None
        self.wake(worker)

    def take_due(self) -> dict[WorkerHandle, None]:
        """All that are due, which are not due any more."""
        due, self.due = self.due, {}
        return due

    def next_in_turn(self) -> WorkerHandle | None:
        """Each of them in turn; None after each that has been lost since, and where there is none."""
        worker = next(self._turns, None)
        if worker is None:
            self._turns = iter(list(self.workers))
            worker = next(self._turns, None)
        return worker if worker is not None and self.has(worker) else None

    def of(self, link: WorkerLink) -> WorkerHandle | None:
        """The worker of a stream, if it has not been lost."""
        worker = self._by_link.get(id(link))
        return worker if worker is not None and worker.link is link else None

    def has(self, worker: WorkerHandle) -> bool:
        """Whether this lease of the worker is still on; false for an earlier one."""
        return self._by_link.get(id(worker.link)) is worker

    def holder_of(self, group: SequenceGroup) -> WorkerHandle | None:
        """The worker that has the group running, or waiting to come back."""
        return next((worker for worker in self.workers if worker.scheduler.groups.holds(group)), None)

    def at(self, address: str) -> list[WorkerHandle]:
        """The worker of an address; all of them for "". Raises UnknownName."""
        workers = [worker for worker in self.workers if address in ("", worker.link.address)]
        if address and not workers:
            known = ", ".join(worker.link.address for worker in self.workers) or "none"
            raise UnknownName(f"no worker {address!r}; there are: {known}")
        return workers
