"""Workers that join, and workers that are given back: their requests end there first, or move to others."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.placement import Placement
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.stranded_groups import StrandedGroups

log = structlog.get_logger()


class Turnover:
    """Belongs to the step loop's thread. Workers that are lost are for `Failures`."""

    def __init__(
        self,
        joined: JoinedWorkers,
        placement: Placement,
        router: Router,
        stranded: StrandedGroups,
        adapters: Adapters,
        clock: Callable[[], int],
    ) -> None:
        self._joined = joined
        self._placement = placement
        self._router = router
        self._waiting = router.queues
        self._stranded = stranded
        self._adapters = adapters
        self._clock = clock

    def join(self, worker: WorkerHandle) -> None:
        """It takes groups from now on: who waits for one like it is placed, and another that only finishes goes."""
        for other in self._joined.workers:
            if other.is_finishing and other.model == worker.model:
                self.give_back(other)
        self._joined.add(worker)
        self._router.join(worker)
        self._joined.last_lost_ns = None
        self._joined.wake(worker)
        self._stranded.look(self._waiting.unbound.all(), self._clock())
        self._placement.place_unbound(worker)
        self._adapters.worker_joined(worker)
        log.info(
            "worker joined",
            worker=worker.link.address,
            instance=worker.info.instance_id,
            epoch=worker.epoch,
            blocks=worker.sizes.num_device_blocks,
            cached_blocks=worker.num_adopted,
        )

    def withhold(self, worker: WorkerHandle, count: int) -> int:
        """Makes a worker's cache smaller by so many blocks. Whom it cannot hold any more waits for another one.

        Returns how many are withheld now. Raises InvalidRequest.
        """
        if count > worker.most_withheld:
            what = f"got {count}; accepted: 0 to {worker.most_withheld}, so that a sequence of any length still fits"
            raise InvalidRequest(FieldViolation("num_blocks", what))
        allocator = worker.scheduler.blocks.allocator
        allocator.withhold(count)
        self._router.touch(worker)
        for group in worker.waiting.in_order():
            if not worker.can_ever_run(group):
                self._placement.place(group)
        self._placement.place_unbound(worker)
        self._stranded.look(self._router.queues.unbound.all(), self._clock())
        self._joined.wake(worker)
        return len(allocator.withheld)

    def drain(self, worker: WorkerHandle, *, may_finish: bool) -> int:
        """It gets no more groups; how many it has.

        `may_finish`: where no other worker has its model, they end on it first, and it is given back after that.
        """
        others = (other for other in self._joined.workers if other is not worker and other.model == worker.model)
        if not may_finish or not all(other.is_closing for other in others):
            return self.give_back(worker)
        worker.is_finishing = True
        self._router.loads.close(worker)
        self._joined.wake(worker)
        where, num_running = worker.link.address, worker.num_running
        log.info("worker is drained, and ends its requests first", worker=where, requests=num_running)
        return _num_held(worker)

    def give_back(self, worker: WorkerHandle) -> int:
        """It gets no more steps, and goes once it has answered those it has; its groups move. How many they are."""
        worker.is_draining = worker.is_leaving = True
        worker.is_finishing = False
        self.closed(worker)
        self._joined.wake(worker)
        log.info("worker is drained", worker=worker.link.address, requests=worker.num_running)
        return _num_held(worker)

    def closed(self, worker: WorkerHandle) -> None:
        """It takes no more groups: those that wait for it wait for others."""
        self._adapters.worker_left(worker)
        for group in self._router.close(worker):
            self._placement.place(group)


def _num_held(worker: WorkerHandle) -> int:
    return len(worker.scheduler.groups.all())
