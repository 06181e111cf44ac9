"""Other rules for which worker gets a request, written anew from their sources, to be compared in one simulator.

All of them see what Octavo knows, which is more than their authors' routers do: exact caches, and loads at the moment
of the decision. A bound request stays bound. Ties are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.leases.worker_handle import WorkerHandle


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker at a decision, as a rule sees it. Work that waits for a worker counts as its own."""

    number: int
    num_requests: int  # that run or wait there
    num_uncomputed_tokens: float  # of prompts there
    num_blocks: float  # in use, or that requests waiting there will need
    num_hit_blocks: int  # of the request's prompt, cached there
    num_outstanding_tokens: int  # of the requests that run


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that is to be given to a worker."""

    num_tokens: int
    num_blocks: int
    block_size: int


def _num_outstanding_tokens(scheduler: Scheduler) -> int:
    """Tokens of all groups there: what attention reads, and what has to be computed when it is lost."""
    waiting = (*scheduler.groups.swapped, *scheduler.groups.preempted)
    held = int(scheduler.columns.num_tokens[scheduler.columns.occupied].sum())
    return held + sum(sequence.num_tokens for group in waiting for sequence in group.unfinished())


Cost = Callable[[Asked, list[Seen]], list[Any]]  # a worker each, the least is best


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, asked: Asked, workers: list[Seen]) -> list[Any]:
        """False for the worker whose turn it is, True for all others: the least cost wins."""
        numbers = sorted(worker.number for worker in workers)
        self._next += 1
        chosen = numbers[self._next % len(numbers)]
        return [worker.number != chosen for worker in workers]


def least_loaded(asked: Asked, workers: list[Seen]) -> list[Any]:
    """The fewest requests."""
    return [worker.num_requests for worker in workers]


def prefix_first(asked: Asked, workers: list[Seen]) -> list[Any]:
    """The most cached blocks; of equals the fewest outstanding tokens: the rule that Octavo had."""
    return [(-worker.num_hit_blocks, worker.num_outstanding_tokens, worker.num_requests) for worker in workers]


def sglang(asked: Asked, workers: list[Seen]) -> list[Any]:
    """SGLang, `cache_aware.rs`: by requests where these differ much, else by the prefix where half of it is there."""
    counts = [worker.num_requests for worker in workers]
    is_imbalanced = max(counts) - min(counts) > 32 and max(counts) > 1.1 * min(counts)
    hits = [worker.num_hit_blocks for worker in workers]
    if not is_imbalanced and max(hits) * asked.block_size > 0.5 * asked.num_tokens:
        return [-hit for hit in hits]
    return list(counts)


def dynamo(asked: Asked, workers: list[Seen]) -> list[Any]:
    """Dynamo, `selector/default.rs`, temperature 0: blocks to be computed, less those cached, and blocks in use."""
    return [
        max(0.0, (worker.num_uncomputed_tokens + asked.num_tokens) / asked.block_size - worker.num_hit_blocks)
        + worker.num_blocks
        + asked.num_blocks
        - worker.num_hit_blocks
        for worker in workers
    ]


def lmetric(asked: Asked, workers: list[Seen]) -> list[Any]:
    """LMetric, `lmetric.rs`: tokens to be computed there, times requests."""
    return [
        (worker.num_uncomputed_tokens + asked.num_tokens - worker.num_hit_blocks * asked.block_size)
        * (worker.num_requests + 1)
        for worker in workers
    ]


RULES: dict[str, Callable[[], Cost]] = {
    "round-robin": RoundRobin,
    "least-loaded": lambda: least_loaded,
    "prefix only": lambda: prefix_first,
    "SGLang": lambda: sglang,
    "Dynamo": lambda: dynamo,
    "LMetric": lambda: lmetric,
}


def use(engine: Engine, rule: Cost, seed: int) -> None:
    """Lets another rule choose, before an engine starts. A request is bound again only if its worker is lost."""
    chooser = _Chooser(engine, rule, seed)
    engine.router._choose = chooser.choose  # type: ignore[method-assign]  # another rule
    engine._rebinding.is_due = lambda worker: False  # type: ignore[method-assign]  # bound once


class _Chooser:
    """Stands in for the router's decision, and leaves it all its bookkeeping."""

    def __init__(self, engine: Engine, rule: Cost, seed: int) -> None:
        self._router = engine.router
        self._clock = engine._clock
        self._rule = rule
        self._random = random.Random(f"rule/{seed}")

    def choose(
        self, group: SequenceGroup, leaving: WorkerHandle | None = None, factor: float = 1.0
    ) -> tuple[WorkerHandle | None, float, float]:
        router, never_late_s = self._router, float("inf")
        if leaving is not None:
            return leaving, 0.0, never_late_s
        router.look()
        numbers = np.flatnonzero(router.loads.that_can_run(group)).tolist()
        if not numbers:
            return None, 0.0, 0.0
        block_size = int(router.loads.load.block_size[numbers[0]])
        cached = router._num_cached_tokens(group, block_size)
        num_tokens = group.num_tokens_to_compute
        asked = Asked(num_tokens, -(-num_tokens // block_size), block_size)
        seen = [self._seen(number, int(cached[number]) // block_size, block_size) for number in numbers]
        costs = self._rule(asked, seen)
        least = min(costs)
        number = self._random.choice([each for each, cost in zip(numbers, costs, strict=True) if cost == least])
        return router.loads.workers[number], float(max(1, num_tokens - cached[number])), never_late_s

    def _seen(self, number: int, num_hit_blocks: int, block_size: int) -> Seen:
        router = self._router
        worker, load, ahead = router.loads.workers[number], router.loads.load, router.work.all()
        assert worker is not None, "only workers that are there can run a group"
        scheduler = worker.scheduler
        held = len(scheduler.groups.all())
        return Seen(
            number,
            num_requests=held + int(router.work.num_groups[number]),
            num_uncomputed_tokens=float(load.num_uncomputed[number] + ahead.num_tokens[number]),
            num_blocks=float(load.num_taken_blocks[number] + ahead.num_tokens[number] / block_size),
            num_hit_blocks=num_hit_blocks,
            num_outstanding_tokens=_num_outstanding_tokens(scheduler),
        )
