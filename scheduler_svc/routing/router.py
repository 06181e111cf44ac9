"""Which worker gets which group: bound when it arrives, by what it costs there in seconds (`routing_cost`).

A group that is bound stands in that worker's queue, and counts as that worker's work from this moment on. It is bound
again when its worker is lost or drained, when it has waited for much longer than it was to wait while another is
cheap, or when a worker that has nothing to begin takes it over. Knows nothing of steps, links or threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.bound_queues import BoundQueues
from scheduler_svc.routing.expected_outputs import ExpectedOutputs
from scheduler_svc.routing.prefix_index import PrefixIndex
from scheduler_svc.routing.queued_work import QueuedWork, Reservation
from scheduler_svc.routing.routing_cost import Ahead, Wanted, WorkerLoad, cheapest, own_s, wait_s
from scheduler_svc.routing.worker_loads import WorkerLoads

OVERRUN, OVERRUN_NS = 2.0, 1_000_000_000  # a wait of so many times what was expected, and so much more, is too long
MUCH_CHEAPER = 2.0
MOST_CLAIMED = 4.0  # times the speed of the slowest other worker that one may have by its own word


@dataclass(slots=True)
class Binding:
    """Where a group is, or waits to be: until it ends or is bound again."""

    worker: WorkerHandle
    reserved: Reservation | None  # None: it has begun
    late_at_ns: int


class Router:
    """Binds groups to workers.

    Args:
        clock: nanoseconds.
        enable_prefix_caching: whether groups find what others have computed.
        seed: of the choice among equals.

    Attributes:
        queues: everything that waits.
        loads, index, work: what decisions are made from.
        outputs: how many tokens sequences of a model are expected to have.
    """

    def __init__(
        self,
        policy: Policy,
        served: ServedTokens,
        clock: Callable[[], int],
        *,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.queues = BoundQueues(policy, served)
        self.loads = WorkerLoads()
        self.index = PrefixIndex()
        self.work = QueuedWork(policy, len(self.loads))
        self.outputs = ExpectedOutputs()
        self._clock = clock
        self._enable_prefix_caching = enable_prefix_caching
        self._random = random.Random(seed)
        self._bindings: dict[SequenceGroup, Binding] = {}
        self._workers: dict[WorkerHandle, None] = {}

    # ---- workers ----------------------------------------------------------------------------------------------------

    def join(self, worker: WorkerHandle) -> None:
        """Gives the worker an empty queue and lets groups be bound to it."""
        worker.waiting = self.queues.new_queue()
        self.loads.join(worker)
        self._workers[worker] = None
        if len(self.loads) > self.work.num_workers:
            self.work.grow(len(self.loads))
        if len(self._workers) == 2:  # a worker that is alone has everything: nobody asks
            for each in self._workers:
                self.watch_cache(each)
        elif len(self._workers) > 2:
            self.watch_cache(worker)
        self._doubt_claims([each for each in self._workers if each.model == worker.model])

    @staticmethod
    def _doubt_claims(alike: list[WorkerHandle]) -> None:
        """Of one model: a speed that no step has shown counts for a few times that of the slowest other one at most."""
        if len(alike) > 1:
            slowest, next_slowest = sorted(1.0 / each.pace.token_s for each in alike)[:2]
            for each in alike:
                is_slowest = 1.0 / each.pace.token_s <= slowest
                each.pace.believe_at_most(MOST_CLAIMED * (next_slowest if is_slowest else slowest))

    def close(self, worker: WorkerHandle) -> list[SequenceGroup]:
        """A worker takes no more groups; those that wait for it, in service order, have to be placed again."""
        self.loads.close(worker)
        return worker.waiting.in_order()

    def leave(self, worker: WorkerHandle) -> list[SequenceGroup]:
        """As `close`, and the worker is gone."""
        self.forget_cache(worker)
        del self._workers[worker]
        self.loads.leave(worker)
        if len(self._workers) == 1:
            for each in self._workers:
                self.forget_cache(each)
        return worker.waiting.in_order()

    def touch(self, worker: WorkerHandle) -> None:
        """Something has happened at a worker that its load may show."""
        self.loads.touch(worker)

    def look(self) -> None:
        """Brings `loads` up to date."""
        self.loads.look(self.outputs.of, self._clock())

    def load_of(self, worker: WorkerHandle) -> tuple[WorkerLoad, Ahead, int]:
        """One worker's load as of the last `look`, what waits for it, and its cached blocks that can be found."""
        number, ahead = worker.number, self.work.all()
        load = WorkerLoad(
            **{each.name: float(getattr(self.loads.load, each.name)[number]) for each in fields(WorkerLoad)}
        )
        waiting = Ahead(float(ahead.num_tokens[number]), float(ahead.num_slots[number]))
        return load, waiting, int(self.loads.num_cached_blocks[number])

    @property
    def has_some_to_spare(self) -> bool:
        """Whether anybody waits for a worker, or to come back to one."""
        return self.queues.num_bound > 0 or self.loads.some_return

    def watch_cache(self, worker: WorkerHandle) -> None:
        """A worker's cache, which may be a new one, is in the index from now on, where one is of use."""
        if self._enable_prefix_caching and len(self._workers) > 1:
            self.index.watch(worker.number, worker.scheduler.blocks.cache)

    def watch_all(self) -> None:
        """The workers were given from elsewhere, and nothing is in the index yet."""
        for worker in self._workers:
            self.watch_cache(worker)

    def forget_cache(self, worker: WorkerHandle) -> None:
        """What this worker has cached counts no more for anybody, until it is watched again."""
        self.index.forget(worker.scheduler.blocks.cache)

    # ---- groups -----------------------------------------------------------------------------------------------------

    def place(self, group: SequenceGroup) -> WorkerHandle | None:
        """Queues a group, which may wait already, for the worker where it costs the least; None: nobody can take it."""
        worker, num_uncached, expected_s = self._choose(group)
        if worker is None:
            self._unreserve(group)
            self._bindings.pop(group, None)
            self.queues.push(group, self.queues.unbound)
        else:
            self.bind(group, worker, num_uncached, expected_s)
        return worker

    def place_elsewhere(self, group: SequenceGroup, factor: float) -> WorkerHandle | None:
        """Queues a group that stands first for another worker, where that is so much cheaper; None: it stays."""
        former = self._bindings[group].worker
        worker, num_uncached, expected_s = self._choose(group, former, factor)
        if worker is None:
            return None
        self.bind(group, worker, num_uncached, expected_s)
        return None if worker is former else worker

    def can_run(self, group: SequenceGroup, worker: WorkerHandle) -> bool:
        """Whether a worker takes groups, and could hold this one with all that it may become."""
        has_adapter = not group.adapter or group.adapter in worker.adapters
        return has_adapter and self.loads.is_open(worker) and worker.can_ever_run(group)

    def is_late(self, group: SequenceGroup) -> bool:
        """Whether a group that waits should have begun long ago."""
        return self._clock() > self._bindings[group].late_at_ns

    def begun(self, group: SequenceGroup) -> None:
        """Its worker has taken it out of the queue."""
        self.queues.remove(group)
        self._unreserve(group)

    def ended(self, group: SequenceGroup) -> None:
        """It has ended, wherever it was."""
        self.queues.remove(group)
        self._unreserve(group)
        self._bindings.pop(group, None)
        if group.first_token_ns is not None:
            lengths = [sequence.num_tokens - group.num_prompt_tokens for sequence in group.sequences]
            self.outputs.ended(group.model, sum(lengths) / max(1, len(lengths)))

    def worker_of(self, group: SequenceGroup) -> WorkerHandle | None:
        """Whom the group runs on or waits for."""
        binding = self._bindings.get(group)
        return None if binding is None else binding.worker

    def check_integrity(self) -> None:
        """Raises AssertionError when bindings, queues, sums and index contradict one another. Reads everything."""
        self.queues.check_integrity()
        counted = np.zeros((2, len(self.loads)))
        for group, binding in self._bindings.items():
            assert binding.worker in self._workers, "a group is bound to a worker that is gone"
            is_waiting = group in binding.worker.waiting
            assert is_waiting == (binding.reserved is not None), "who has begun reserves nothing, who waits does"
            assert is_waiting or binding.worker.scheduler.groups.holds(group), "a bound group is not with its worker"
            if binding.reserved is not None:
                assert binding.reserved.number == binding.worker.number, "reserved elsewhere"
                counted[:, binding.worker.number] += binding.reserved.num_tokens, binding.reserved.num_slots
        assert all(group in self._bindings for each in self._workers for group in each.waiting.all()), "waits unbound"
        ahead = self.work.all()
        assert np.allclose(counted, [ahead.num_tokens, ahead.num_slots]), "what is reserved is miscounted"
        has_index = self._enable_prefix_caching and len(self._workers) > 1
        caches = [(each.number, each.scheduler.blocks.cache) for each in self._workers] if has_index else []
        self.index.check_integrity(caches)

    # ---- one decision -----------------------------------------------------------------------------------------------

    def _choose(
        self, group: SequenceGroup, leaving: WorkerHandle | None = None, factor: float = 1.0
    ) -> tuple[WorkerHandle | None, float, float]:
        """A worker, the tokens that it would have to compute, and how long the group is to wait there, in seconds.

        `leaving`: where it waits now, unless another one is cheaper by `factor`.
        """
        num_tokens = float(group.num_tokens_to_compute)
        if len(self._workers) == 1:
            (only,) = self._workers
            return (only if self.can_run(group, only) else None), num_tokens, float("inf")
        self.look()
        can_run = self.loads.that_can_run(group)
        if not can_run.any():
            return None, num_tokens, 0.0
        num_cached = self._num_cached_tokens(group, int(self.loads.load.block_size[can_run.argmax()]))
        wanted = Wanted(np.maximum(num_tokens - num_cached, 1.0), group.num_slots, self.expected_outputs(group))
        ahead = self.work.ahead(group)
        if leaving is not None:  # where it stands first by now
            ahead = Ahead(ahead.num_tokens.copy(), ahead.num_slots.copy())
            ahead.num_tokens[leaving.number] = ahead.num_slots[leaving.number] = 0.0
        waits_s = wait_s(self.loads.load, ahead, wanted)
        costs = waits_s + own_s(self.loads.load, ahead, wanted)
        if leaving is not None:
            costs[leaving.number] /= factor
        equal = cheapest(costs, self.loads.num_cached_blocks, can_run).tolist()
        if leaving is not None and leaving.number in equal:
            equal = [leaving.number]
        number = equal[0] if len(equal) == 1 else self._random.choice(equal)
        worker = self.loads.workers[number]
        return worker, float(wanted.num_uncached[number]), float(waits_s[number])

    def _num_cached_tokens(self, group: SequenceGroup, block_size: int) -> npt.NDArray[np.int64]:
        """Of the group's first sequence, at each worker; at least one token is left to compute."""
        if not len(self.index) or group.awaits_prompt_logprobs:
            return np.zeros(len(self.loads), np.int64)
        sequence = group.sequences[0]
        hashes = sequence.hashes(0, (sequence.num_tokens - 1) // block_size, block_size)
        return self.index.num_cached(hashes, len(self.loads)) * block_size

    def expected_outputs(self, group: SequenceGroup) -> float:
        """Tokens that each of its sequences may be expected to have in the end."""
        return min(self.outputs.of(group.model), group.max_num_tokens - group.num_prompt_tokens)

    def bind(self, group: SequenceGroup, worker: WorkerHandle, num_uncached: float, expected_s: float = 0.0) -> None:
        """Queues a group, which may wait elsewhere, for a worker that has so many of its tokens to compute."""
        self.queues.push(group, worker.waiting)
        self._unreserve(group)
        late_ns = OVERRUN * expected_s * 1e9 + OVERRUN_NS
        late_at_ns = self._clock() + int(min(late_ns, 1e18))
        reserved = self.work.add(group, worker.number, num_uncached)
        self._bindings[group] = Binding(worker, reserved, late_at_ns)

    def _unreserve(self, group: SequenceGroup) -> None:
        binding = self._bindings.get(group)
        if binding is not None and binding.reserved is not None:
            self.work.remove(binding.reserved)
            binding.reserved = None
