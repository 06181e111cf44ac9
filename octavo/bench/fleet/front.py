"""The choice among shards, as a frontend makes it: by what each told at its last report, and what it was given since.

The table, the bits of caches and the cost are those of the scheduler's frontends; reports come 20 times a second of
virtual time, at no cost of time. Groups that wait in one shard are not moved to another here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine
    from scheduler_svc.sequence import SequenceGroup
    from scheduler_svc.shards.cached_bits import CachedBits
    from scheduler_svc.shards.routing_table import KnownWorker
    from scheduler_svc.worker_handle import WorkerHandle

INTERVAL_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class _Told:
    """A worker that was described, by its number in its shard."""

    number: int
    bits: CachedBits


class Front:
    """`due_ns`: when shards report next. `cpu_ns`: what its choices took, in real time, and `num_choices` of them."""

    def __init__(self, engines: Sequence[Engine], block_size: int) -> None:
        from scheduler_svc.shards.routing_table import RoutingTable

        self.due_ns = 0
        self.cpu_ns = self.num_choices = 0
        self._engines = engines
        self._block_size = block_size
        self._table = RoutingTable()
        self._told: dict[WorkerHandle, _Told] = {}
        self._num_given = [0] * len(engines)

    def report(self, now_ns: int) -> None:
        """Every shard tells what it has. To be called between steps."""
        for shard in range(len(self._engines)):
            self._report(shard)
        self.due_ns = now_ns + INTERVAL_NS

    def choose(self, group: SequenceGroup) -> int:
        """The shard that gets the group: of the cheapest worker; where there is none, the first."""
        from scheduler_svc.shards.group_wants import wanted_of

        began_ns = time.thread_time_ns()
        choice = self._table.choose(wanted_of(group, self._block_size, lambda shard: None), range(len(self._engines)))
        shard = 0 if choice is None else choice.shard
        self._num_given[shard] += 1
        if choice is not None:
            self._table.assign(choice, self._num_given[shard])
        self.cpu_ns += time.thread_time_ns() - began_ns
        self.num_choices += 1
        return shard

    def _report(self, shard: int) -> None:
        from scheduler_svc.shards.cached_bits import CachedBits
        from scheduler_svc.shards.routing_table import LOAD_NAMES

        engine, table = self._engines[shard], self._table
        router = engine.router
        router.look()
        loads, ahead = router.loads, router.work.all()
        workers = [worker for worker in engine.workers if not worker.is_draining]
        new: dict[int, KnownWorker] = {}
        changes = []
        for worker in workers:
            told, blocks = self._told.get(worker), worker.scheduler.blocks
            is_new = told is None
            if told is None:
                told = self._told[worker] = _Told(len(self._told), CachedBits(blocks.allocator.num_blocks))
            changed = blocks.cache.take_changes()
            came, went = told.bits.change(changed.published, changed.forgotten)
            if is_new:
                new[told.number] = _known(worker, told.bits)
            else:
                changes.append((told.number, came, went))
        table.set_workers(shard, [self._told[worker].number for worker in workers], new)
        for worker in workers:
            number = worker.number
            load = {name: float(getattr(loads.load, name)[number]) for name in LOAD_NAMES}
            load["num_ahead_tokens"], load["num_ahead_slots"] = ahead.num_tokens[number], ahead.num_slots[number]
            load["num_cached_blocks"] = float(loads.num_cached_blocks[number])
            table.report(shard, self._told[worker].number, load)
        for number, came, went in changes:
            table.change_bits(shard, number, came, went)
        table.contains(shard, self._num_given[shard])
        table.expect(shard, router.num_outputs)


def _known(worker: WorkerHandle, bits: CachedBits) -> KnownWorker:
    import numpy as np

    from scheduler_svc.shards.routing_table import KnownWorker

    return KnownWorker(
        model="",
        block_size=worker.info.block_size,
        max_model_len=worker.sizes.max_model_len,
        max_cached_tokens=worker.sizes.num_device_blocks * worker.info.block_size,
        takes_adapters=False,
        num_bits=bits.num_bits,
        bits=np.frombuffer(bits.snapshot(), np.uint8),
    )
