"""The choice among shards, as a frontend makes it: by the last report of each shard, and what it was given since.

The table, the bits of caches and the cost are those of the scheduler's frontends; reports come as often as there, in
virtual time and at no cost of time. Groups that wait in one shard are not moved to another here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.leases.worker_handle import WorkerHandle
    from scheduler_svc.shards.cached_bits import CachedBits
    from scheduler_svc.shards.routing_table import KnownWorker


@dataclass(frozen=True, slots=True)
class _Told:
    """A worker that was described, by its number in its shard."""

    number: int
    bits: CachedBits


class Front:
    """`due_ns`: when shards report next. `cpu_ns`: what its choices took, in real time, and `num_choices` of them."""

    def __init__(self, engines: Sequence[Engine], block_size: int) -> None:
        from scheduler_svc.shards.routing_table import RoutingTable
        from scheduler_svc.shards.shard_reporter import INTERVAL_S

        self._interval_ns = round(INTERVAL_S * 1e9)
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
        self.due_ns = now_ns + self._interval_ns

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
        from scheduler_svc.shards.shard_reporter import look

        table, seen = self._table, look(self._engines[shard])
        new: dict[int, KnownWorker] = {}
        changes = []
        for each in seen:
            told, is_new = self._told.get(each.handle), each.handle not in self._told
            if told is None:
                num_blocks = each.handle.scheduler.blocks.allocator.num_blocks
                told = self._told[each.handle] = _Told(len(self._told), CachedBits(num_blocks))
            came, went = told.bits.change(each.changes.published, each.changes.forgotten)
            if is_new:
                new[told.number] = _known(each.handle, told.bits)
            else:
                changes.append((told.number, came, went))
        table.set_workers(shard, [self._told[each.handle].number for each in seen], new)
        for each in seen:
            load = {
                **dataclasses.asdict(each.load),
                "num_ahead_tokens": each.ahead.num_tokens,
                "num_ahead_slots": each.ahead.num_slots,
                "num_cached_blocks": float(each.num_cached_blocks),
                "num_outputs": each.num_outputs,
            }
            table.report(shard, self._told[each.handle].number, load)
        for number, came, went in changes:
            table.change_bits(shard, number, came, went)
        table.contains(shard, self._num_given[shard])


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
