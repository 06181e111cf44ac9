"""What the routing cost reads of each worker, in columns by the workers' numbers.

A worker is measured again only after something has happened there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.routing_cost import WorkerLoad

FIRST_NUMBERS = 8  # workers that there is room for at first


class WorkerLoads:
    """Columns over numbers, which are given again once their workers have left.

    Attributes:
        workers: by number; None where nobody has it.
        load: arrays [numbers] for the cost.
        num_cached_blocks: that can be found at each worker.
        num_returning: preempted and swapped groups of each worker.
        num_measured: workers looked at so far, for those who count what a decision costs.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerHandle | None] = [None] * FIRST_NUMBERS
        self.num_open = 0
        self.num_cached_blocks = np.zeros(FIRST_NUMBERS, np.int64)
        self.num_returning = np.zeros(FIRST_NUMBERS, np.int64)
        self.num_measured = 0
        self._due_ns: npt.NDArray[np.float64] = np.full(FIRST_NUMBERS, np.inf)  # answers to the oldest steps
        ones = {field.name: np.ones(FIRST_NUMBERS) for field in fields(WorkerLoad)}
        self.load = WorkerLoad(**ones)
        self._stale: dict[WorkerHandle, None] = {}
        self._is_open: npt.NDArray[np.bool_] = np.zeros(FIRST_NUMBERS, np.bool_)
        self._max_model_len = np.zeros(FIRST_NUMBERS, np.int64)
        self._model = np.zeros(FIRST_NUMBERS, np.int64)
        self._model_numbers: dict[str, int] = {"": 0}
        self._block_sizes: set[int] = set()  # of all that have been here

    def __len__(self) -> int:
        return len(self.workers)

    def join(self, worker: WorkerHandle) -> int:
        """The number that a worker has from now on."""
        if None not in self.workers:
            self._grow(2 * len(self.workers))
        number = worker.number = self.workers.index(None)
        self.workers[number] = worker
        self._is_open[number] = True
        self.num_open += 1
        self._max_model_len[number] = worker.scheduler.columns.max_model_len
        self._block_sizes.add(worker.scheduler.columns.block_size)
        self._model[number] = self._model_numbers.setdefault(worker.model, len(self._model_numbers))
        for each in self.workers:
            if each is not None:
                self.touch(each)
        return number

    def close(self, worker: WorkerHandle) -> None:
        """It takes no more groups."""
        if self._is_open[worker.number] and self.workers[worker.number] is worker:
            self._is_open[worker.number] = False
            self.num_open -= 1

    def leave(self, worker: WorkerHandle) -> None:
        """Frees the worker's number for another one."""
        self.close(worker)
        self.workers[worker.number] = None
        self.num_returning[worker.number] = 0
        self._due_ns[worker.number] = np.inf
        self._stale.pop(worker, None)

    @property
    def some_return(self) -> bool:
        """Whether a preempted or swapped group waits to come back."""
        return bool(self.num_returning.any())

    def is_open(self, worker: WorkerHandle) -> bool:
        """Whether groups may be bound to it."""
        return self.workers[worker.number] is worker and bool(self._is_open[worker.number])

    def alike(self, worker: WorkerHandle) -> npt.NDArray[np.bool_]:
        """Which numbers may have groups that a worker serves, by their model."""
        model = self._model[worker.number]
        alike: npt.NDArray[np.bool_] = (self._model == model) | (self._model == 0) | (model == 0)
        return alike

    def touch(self, worker: WorkerHandle) -> None:
        """Something has happened at a worker."""
        if self.num_open > 1:
            self.num_returning[worker.number] = worker.scheduler.groups.num_away
        self._stale[worker] = None

    def look(self, num_outputs: Callable[[str], float], now_ns: int) -> None:
        """Brings the columns up to date; `num_outputs`: tokens that a sequence of a model is expected to have."""
        for worker in self._stale:
            load, number = measured(worker, num_outputs(worker.model), now_ns), worker.number
            for name in _NAMES:
                getattr(self.load, name)[number] = getattr(load, name)
            self._due_ns[number] = worker.answer_due_ns
            self.num_cached_blocks[number] = len(worker.scheduler.blocks.cache)
            self.num_measured += 1
        self._stale.clear()
        self.load.late_s = np.maximum(0.0, now_ns - self._due_ns) / 1e9

    def that_can_run(self, group: SequenceGroup) -> npt.NDArray[np.bool_]:
        """Which workers are open, serve the group's model, and could hold it with all that it may become."""
        can: npt.NDArray[np.bool_] = self._is_open & (self._max_model_len >= group.max_num_tokens)
        can &= self.load.num_slots >= group.num_slots
        if group.model:
            can &= (self._model == self._model_numbers.get(group.model, -1)) | (self._model == 0)
        for block_size in self._block_sizes:
            num_blocks = group.num_distinct_blocks(block_size)
            can &= (self.load.num_blocks >= num_blocks) | (self.load.block_size != block_size)
        if group.adapter:
            has = [worker is not None and group.adapter in worker.adapters for worker in self.workers]
            can &= np.array(has, np.bool_)
        return can

    def _grow(self, count: int) -> None:
        more = count - len(self.workers)
        self.workers += [None] * more
        for name in _NAMES:
            setattr(self.load, name, np.pad(getattr(self.load, name), (0, more), constant_values=1.0))
        for name in ("num_cached_blocks", "num_returning", "_is_open", "_max_model_len", "_model"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self._due_ns = np.pad(self._due_ns, (0, more), constant_values=np.inf)


_NAMES = tuple(field.name for field in fields(WorkerLoad))


def measured(worker: WorkerHandle, num_outputs: float, now_ns: int, *, counts_returning: bool = True) -> WorkerLoad:
    """A worker's load in numbers. Without `counts_returning` as if no preempted or swapped group were to come back."""
    scheduler, pace = worker.scheduler, worker.pace
    columns, groups, blocks = scheduler.columns, scheduler.groups, scheduler.blocks
    num_slots = columns.max_num_seqs
    num_taken = num_slots - groups.num_free_slots
    known, computed = columns.num_known_tokens, columns.num_computed_tokens
    num_uncomputed = sum(int(known[each.slot] - computed[each.slot]) for each in groups.prefilling)
    num_uncomputed += sum(step.num_prefill_tokens for step in worker.in_flight)
    if counts_returning:
        num_taken += sum(group.num_slots for group in (*groups.preempted, *groups.swapped))
        num_uncomputed += sum(group.num_tokens_to_compute for group in groups.preempted)
    budget = scheduler.max_num_batched_tokens
    return WorkerLoad(
        tokens_per_s=pace.prompt_tokens_per_s(scheduler.num_decoding, budget, worker.most_prompt_tokens),
        late_s=max(0.0, now_ns - worker.answer_due_ns) / 1e9,
        num_uncomputed=float(num_uncomputed),
        base_s=pace.base_s,
        token_s=pace.token_s,
        turnover_s=num_outputs * (pace.mean_s or pace.seconds(num_slots)),
        num_slots=float(num_slots),
        num_taken_slots=float(num_taken),
        num_blocks=float(blocks.allocator.num_usable),
        num_taken_blocks=float(blocks.allocator.num_usable - blocks.num_free_blocks),
        block_size=float(blocks.block_size),
    )
