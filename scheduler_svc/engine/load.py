"""How busy a scheduler is at this moment, for its log line and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by state, and the share of cache blocks in use, from 0 to 1.

    Attributes:
        num_pending: requests that have no slot and no host blocks: they wait, or are to be computed again. Those that a
            limit of their tenant holds are not among them: more workers would not help.
    """

    num_running: int
    num_swapped: int
    num_pending: int
    num_workers: int
    device_usage: float
    host_usage: float

    @classmethod
    def of(cls, engine: Engine) -> Load:
        """From any thread; states that change meanwhile may be counted twice or not at all."""
        return cls._of_schedulers(
            [worker.scheduler for worker in list(engine.workers)], engine.num_live - engine.num_held
        )

    @classmethod
    def by_model(cls, engine: Engine) -> dict[str, Load]:
        """By the names of models, those of workers and those of requests without any. As `of`."""
        metrics, schedulers, num_live = engine.metrics, dict[str, list[Scheduler]](), Counter[str]()
        for worker in list(engine.workers):
            schedulers.setdefault(metrics.name_of(worker.model), []).append(worker.scheduler)
        for model, count in engine.num_due_by_model().items():
            num_live[metrics.name_of(model)] += count
        return {
            name: cls._of_schedulers(schedulers.get(name, []), num_live[name])
            for name in {**dict.fromkeys(metrics.by_name()), **schedulers, **num_live}
        }

    @classmethod
    def _of_schedulers(cls, schedulers: Sequence[Scheduler], num_live: int) -> Load:
        num_running = sum(len(scheduler.groups.running) for scheduler in schedulers)
        num_swapped = sum(len(scheduler.groups.swapped) for scheduler in schedulers)
        return cls(
            num_running=num_running,
            num_swapped=num_swapped,
            num_pending=max(0, num_live - num_running - num_swapped),
            num_workers=len(schedulers),
            device_usage=_usage(scheduler.blocks.allocator for scheduler in schedulers),
            host_usage=_usage(scheduler.blocks.host_allocator for scheduler in schedulers),
        )


def _usage(pools: Iterable[BlockAllocator]) -> float:
    counts = [(pool.num_blocks, pool.num_free) for pool in pools]
    num_blocks = sum(num_blocks for num_blocks, _ in counts)
    return 1.0 - sum(num_free for _, num_free in counts) / num_blocks if num_blocks else 0.0
