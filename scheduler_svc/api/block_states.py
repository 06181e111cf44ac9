"""Cache blocks of workers as `Control` shows them: arrays are copied between two steps, messages are made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos import inference_pb2 as pb
from scheduler_svc.api.pages import bad_token, page_size
from scheduler_svc.core.sequences.block_hashes import BlockIds
from scheduler_svc.leases.worker_handle import WorkerHandle

DEFAULT_PAGE, LARGEST_PAGE = 1000, 10_000


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """One pool of a worker's blocks at one moment.

    Attributes (shape [blocks]):
        is_shown: whether the block is in use or cached.
    """

    worker: str
    on_host: bool
    ref_counts: BlockIds
    is_cached: npt.NDArray[np.bool_]
    is_shown: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Where a page of blocks begins, behind which one of the blocks named by worker, pool and id; how long it is."""

    worker: str
    on_host: bool
    block_id: int
    limit: int

    @classmethod
    def asked(cls, request: pb.GetBlocksRequest) -> BlockPage:
        """Raises InvalidRequest."""
        limit = page_size(request, DEFAULT_PAGE, LARGEST_PAGE)
        if not request.page_token:
            return cls("", False, -1, limit)
        worker, pool, block_id = [*request.page_token.rsplit("/", 2), "", ""][:3]
        if pool not in ("device", "host") or not (block_id.isascii() and block_id.isdecimal() and len(block_id) < 20):
            raise bad_token()
        return cls(worker, pool == "host", int(block_id), limit)

    def copy(self, workers: AbstractSequence[WorkerHandle]) -> list[PoolCopy]:
        """The pools from where the page begins. On the step loop's thread. Raises InvalidRequest: that is gone."""
        pools = []
        for handle in workers:
            blocks = handle.scheduler.blocks
            for allocator, on_host in ((blocks.allocator, False), (blocks.host_allocator, True)):
                pools.append((handle.link.address, on_host, allocator))
        places = [(address, on_host) for address, on_host, _ in pools]
        if self.worker and (self.worker, self.on_host) not in places:
            raise bad_token("its worker is gone")
        first = places.index((self.worker, self.on_host)) if self.worker else 0
        copies: list[PoolCopy] = []
        num_shown = 0
        for address, on_host, allocator in pools[first:]:
            if num_shown > self.limit:
                break
            counts = allocator.ref_counts.copy()
            cache = allocator.cache
            is_cached = np.zeros(len(counts), np.bool_) if cache is None else cache.is_cached.copy()
            is_shown = (counts > 0) | is_cached
            if not copies:
                is_shown[: self.block_id + 1] = False
            copies.append(PoolCopy(address, on_host, counts, is_cached, is_shown))
            num_shown += int(is_shown.sum())
        return copies

    def message(self, pools: AbstractSequence[PoolCopy]) -> pb.GetBlocksResponse:
        """One page of what `copy` took, with the token of the next one where there is more."""
        response = pb.GetBlocksResponse()
        for pool in pools:
            for block_id in np.flatnonzero(pool.is_shown).tolist():
                if len(response.blocks) == self.limit:
                    last = response.blocks[-1]
                    place = "host" if last.on_host else "device"
                    response.next_page_token = f"{last.worker}/{place}/{last.block_id}"
                    return response
                response.blocks.add(
                    worker=pool.worker,
                    block_id=block_id,
                    on_host=pool.on_host,
                    ref_count=int(pool.ref_counts[block_id]),
                    cached=bool(pool.is_cached[block_id]),
                )
        return response
