"""A server as it can be drawn: queues, workers, requests and blocks of one moment, for `Control.GetView`.

What is copied between two steps is bounded by what was asked for, and made into messages elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np

from protos import inference_pb2 as pb
from scheduler_svc.api.request_states import LARGEST_PAGE, RequestCopy, RequestPage
from scheduler_svc.core.sequences.block_hashes import BlockIds
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.leases.worker_handle import WorkerHandle

DEFAULT_REQUESTS = 100
DEFAULT_BLOCKS, MOST_BLOCKS = 4096, 65_536


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """The first blocks of one pool at one moment."""

    worker: str
    on_host: bool
    num_blocks: int
    ref_counts: BlockIds
    cached_blocks: BlockIds
    withheld_blocks: list[int]
    num_to_withhold: int
    max_withheld: int

    @classmethod
    def of(cls, worker: WorkerHandle, on_host: bool, most: int) -> PoolCopy:
        """On the step loop's thread."""
        blocks = worker.scheduler.blocks
        allocator = blocks.host_allocator if on_host else blocks.allocator
        cache = allocator.cache
        cached = np.zeros(0, np.int32) if cache is None else np.flatnonzero(cache.is_cached[:most]).astype(np.int32)
        return cls(
            worker.link.address,
            on_host,
            allocator.num_blocks,
            allocator.ref_counts[:most].copy(),
            cached,
            [block for block in allocator.withheld if block < most],
            allocator.num_to_withhold,
            0 if on_host else worker.most_withheld,
        )

    def message(self) -> pb.BlockPool:
        """As it is sent."""
        return pb.BlockPool(
            worker=self.worker,
            on_host=self.on_host,
            num_blocks=self.num_blocks,
            ref_counts=self.ref_counts.tolist(),
            cached_blocks=self.cached_blocks.tolist(),
            withheld_blocks=self.withheld_blocks,
            num_to_withhold=self.num_to_withhold,
            max_withheld=self.max_withheld,
        )


@dataclass(frozen=True, slots=True)
class ViewCopy:
    """All of a moment."""

    load: pb.Load
    requests: list[RequestCopy]
    has_more_requests: bool
    pools: list[PoolCopy]

    def message(self, name_of: Callable[[str], str]) -> pb.View:
        """As it is sent. `name_of`: a model's, by its fingerprint."""
        return pb.View(
            load=self.load,
            requests=[request.message(name_of) for request in self.requests],
            has_more_requests=self.has_more_requests,
            pools=[pool.message() for pool in self.pools],
        )


@dataclass(frozen=True, slots=True)
class ViewAsked:
    """How much of it is wanted."""

    max_requests: int
    max_blocks: int

    @classmethod
    def of(cls, request: pb.GetViewRequest) -> ViewAsked:
        """Raises InvalidRequest."""
        return cls(
            _bounded(request, "max_requests", DEFAULT_REQUESTS, LARGEST_PAGE),
            _bounded(request, "max_blocks", DEFAULT_BLOCKS, MOST_BLOCKS),
        )

    def copy(
        self,
        load: pb.Load,
        numbered: AbstractSequence[tuple[int, SequenceGroup]],
        workers: AbstractSequence[WorkerHandle],
    ) -> ViewCopy:
        """On the step loop's thread. `numbered`: live requests, one more than are wanted where there are so many."""
        requests, more = RequestPage(0, self.max_requests).copy(numbered, workers)
        pools = [PoolCopy.of(worker, on_host, self.max_blocks) for worker in workers for on_host in (False, True)]
        return ViewCopy(load, requests, bool(more), pools)


def merged(views: AbstractSequence[pb.View], max_requests: int) -> pb.View:
    """Of several servers that stand for one, but for its load: the oldest requests of all."""
    requests = sorted((request for view in views for request in view.requests), key=lambda each: -each.age_ns)
    return pb.View(
        requests=requests[:max_requests],
        has_more_requests=len(requests) > max_requests or any(view.has_more_requests for view in views),
        pools=[pool for view in views for pool in view.pools],
    )


def _bounded(request: pb.GetViewRequest, field: str, default: int, most: int) -> int:
    if not request.HasField(field):
        return default
    value: int = getattr(request, field)
    if value > most:
        raise InvalidRequest(FieldViolation(field, f"got {value}; accepted: 0 to {most}"))
    return value
