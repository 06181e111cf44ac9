"""Moves waiting groups to a cheaper worker: one that has nothing to begin takes them, or they have waited too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.router import MUCH_CHEAPER, Router
from scheduler_svc.routing.routing_cost import Ahead, Wanted, WorkerLoad, cost_s, wait_s
from scheduler_svc.routing.worker_loads import measured

MAX_LOADED = 3  # workers of its model that are looked at for what to take over, the most loaded first
MAX_TAKEN = 64  # groups of each of them that are looked at
CHEAPER, CHEAPER_S = 1.05, 1e-3  # what a move has to gain, that groups do not go to and fro
PAUSE_NS = 20_000_000  # after a look that has found nothing
MAX_LATE = 8  # groups of one worker that are looked at in one go


class Rebinding:
    """Moves groups between the workers of a router."""

    def __init__(self, router: Router, clock: Callable[[], int]) -> None:
        self._router = router
        self._clock = clock
        self._turns: Iterator[WorkerHandle] = iter(())

    # ---- a worker that has nothing to begin -------------------------------------------------------------------------

    def start_over(self) -> None:
        """Takes turns from the first worker again, so that none is held that is gone."""
        self._turns = iter(())

    def is_due(self, worker: WorkerHandle) -> bool:
        """Whether a worker has room for more than waits for it, and others have somebody to spare."""
        router = self._router
        if router.loads.num_open < 2 or len(worker.waiting) or not router.loads.is_open(worker):
            return False
        if not router.has_some_to_spare:
            return False
        has_room = worker.takes_new_groups and worker.scheduler.groups.num_free_slots > 0
        return has_room and self._clock() >= worker.look_again_ns

    def take_over(self, worker: WorkerHandle) -> int:
        """Binds groups to it that would cost more where they wait. How many these are."""
        router, num_taken = self._router, 0
        router.look()
        here, ahead = measured(worker, router.outputs.of(worker.model), self._clock()), Ahead(0.0, 0.0)
        for loaded in self._most_loaded(worker):
            for group, num_uncached in self._cheaper_here(worker, here, ahead, loaded):
                self._take(group, worker, loaded, num_uncached)
                num_taken += 1
        if not num_taken:
            worker.look_again_ns = self._clock() + PAUSE_NS
        return num_taken

    def _most_loaded(self, worker: WorkerHandle) -> list[WorkerHandle]:
        router = self._router
        waits = np.asarray(wait_s(router.loads.load, router.work.all(), Wanted(0.0, 1, 0.0)))
        has_some = router.work.num_groups + router.loads.num_returning > 0
        waits = np.where(has_some & router.loads.alike(worker), waits, -1.0)
        waits[worker.number] = -1.0
        workers = [
            router.loads.workers[number] for number in np.argsort(waits)[::-1][:MAX_LOADED] if waits[number] >= 0
        ]
        return [each for each in workers if each is not None]

    def _cheaper_here(
        self, worker: WorkerHandle, here: WorkerLoad, ahead: Ahead, loaded: WorkerHandle
    ) -> list[tuple[SequenceGroup, float]]:
        """Groups of a loaded worker that cost less here, with their tokens that are not cached here.

        `ahead`: what was found before; that of these is added.
        """
        router, found = self._router, []
        expected = router.outputs.of(loaded.model)
        there = measured(loaded, expected, self._clock(), counts_returning=False)
        before = Ahead(0.0, 0.0)  # that stay there
        # Those who run are half done on average; the blocks of what is to come are taken before anybody returns.
        growing = there.num_taken_slots * expected / 2
        waiting = loaded.waiting.trials()[:MAX_TAKEN] + loaded.waiting.candidates(MAX_TAKEN)
        for group in [*loaded.scheduler.releasable(), *waiting]:
            num_there, num_outputs = self._num_uncached(group, loaded), router.expected_outputs(group)
            stay = Wanted(num_there, group.num_slots, num_outputs)
            if router.can_run(group, worker):
                num_here = self._num_uncached(group, worker, is_moved=True)
                go = Wanted(num_here, group.num_slots, num_outputs)
                returns = loaded.scheduler.groups.holds(group)
                first = Ahead(before.num_tokens + growing, before.num_slots) if returns else before
                if CHEAPER * cost_s(here, ahead, go) + CHEAPER_S < cost_s(there, first, stay):
                    found.append((group, num_here))
                    ahead.num_tokens += num_here
                    ahead.num_slots += group.num_slots
                    continue
            before.num_tokens += num_there
            before.num_slots += group.num_slots
        return found

    @staticmethod
    def _num_uncached(group: SequenceGroup, worker: WorkerHandle, is_moved: bool = False) -> float:
        """What is swapped out is lost where the group moves."""
        if not is_moved and any(each.status is SequenceStatus.SWAPPED for each in group.sequences):
            return 0.0
        num_cached = len(worker.scheduler.blocks.find(group.sequences[0])) * worker.scheduler.blocks.block_size
        return max(1.0, group.num_tokens_to_compute - num_cached)

    def _take(self, group: SequenceGroup, worker: WorkerHandle, loaded: WorkerHandle, num_uncached: float) -> None:
        if loaded.scheduler.groups.holds(group):
            loaded.scheduler.release(group)
            group.num_moves += 1
        self._router.touch(loaded)
        self._router.bind(group, worker, num_uncached)

    # ---- waits that are too long ------------------------------------------------------------------------------------

    def look_at_late(self) -> list[WorkerHandle]:
        """Looks at the next worker in turn. The groups first in its queue that should have begun long ago go elsewhere
        if that is much cheaper; to whom they went."""
        router = self._router
        if router.loads.num_open < 2 or not router.queues.num_bound:
            return []
        worker = next(self._turns, None)
        if worker is None:
            self._turns = iter([each for each in router.loads.workers if each is not None])
            worker = next(self._turns)
        head, moved = worker.waiting.peek() or worker.waiting.peek_trial(), list[WorkerHandle]()
        if head is None or not router.is_late(head):
            return []
        for group in worker.waiting.trials()[:MAX_LATE] + worker.waiting.candidates(MAX_LATE):
            if router.is_late(group) and (other := router.place_elsewhere(group, MUCH_CHEAPER)) is not None:
                moved.append(other)
        return moved
