"""Blocks that an operator withholds: nobody gets them, none is lost, and who does not fit any more waits for room."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.errors import InvalidRequest, UnknownName
from scheduler_svc.leases.worker_handle import WorkerHandle
from tests.scheduler.hand_turned_loop import Loop


def test_free_blocks_are_withheld_at_once_and_others_as_they_are_given_up() -> None:
    pool = BlockAllocator(10)
    held = pool.allocate(7)
    pool.withhold(6)
    assert (len(pool.withheld), pool.num_free, pool.num_usable) == (3, 0, 4)
    pool.check_integrity()
    pool.free(held[:2])
    assert (len(pool.withheld), pool.num_free) == (5, 0)
    pool.free(held[2:])
    assert (len(pool.withheld), pool.num_free) == (6, 4)
    pool.check_integrity()
    assert not set(pool.allocate(4).tolist()) & set(pool.withheld)
    pool.withhold(1)
    assert (len(pool.withheld), pool.num_free) == (1, 5)
    pool.withhold(0)
    assert not pool.withheld and pool.num_free == 6
    pool.check_integrity()


def test_a_pool_without_content_gives_all_that_it_has() -> None:
    pool = BlockAllocator(4)
    held = pool.allocate(4)
    assert held.tolist() == [0, 1, 2, 3] and pool.num_free == 0 and pool.num_in_use(held) == 4
    pool.free(held[1:3])
    assert pool.allocate(2).tolist() == [2, 1], "the last one freed is the first one used"
    pool.free(held)
    pool.withhold(4)
    assert pool.num_free == 0 and sorted(pool.withheld) == [0, 1, 2, 3]
    pool.check_integrity()


def test_content_that_nobody_uses_goes_first_where_blank_blocks_are_too_few() -> None:
    cache = PrefixCache(6)
    pool = BlockAllocator(6, cache)
    blocks = pool.allocate(4)
    cache.publish([bytes([number]) * 32 for number in range(4)], blocks, np.full(4, -1, np.int32))
    pool.free(blocks)
    pool.withhold(4)
    pool.check_integrity()
    assert len(cache) == 2 and cache.find([bytes([0]) * 32]) == [blocks[0]], "the ends of prefixes were given up"


def withhold(loop: Loop, address: str, count: int) -> int:
    done: Future[int] = loop.engine.withhold_blocks(address, count)
    loop.turn()
    return done.result(0)


def test_a_sequence_of_any_length_still_fits_and_a_worker_has_to_be_named() -> None:
    loop = Loop()
    loop.join("here:1")  # 32 blocks of 4 tokens, of which the longest sequence needs all
    loop.turn()
    with pytest.raises(InvalidRequest, match="num_blocks: got 1; accepted: 0 to 0, so that"):
        withhold(loop, "here:1", 1)
    with pytest.raises(UnknownName):
        withhold(loop, "nowhere:1", 0)
    assert withhold(loop, "here:1", 0) == 0


@pytest.mark.parametrize("num_answered", [None, 0, 3])
def test_who_does_not_fit_any_more_waits_and_runs_when_the_blocks_are_given_back(
    monkeypatch: pytest.MonkeyPatch, num_answered: int | None
) -> None:
    """It waits for the worker (None: it comes later), or runs there, when its cache gets too small."""
    monkeypatch.setattr(WorkerHandle, "most_withheld", 31)  # else everything fits
    loop = Loop()
    link = loop.join("here:1")
    loop.turn()
    (worker,) = loop.engine.workers
    if num_answered is not None:
        loop.engine.submit(loop.group("long", num_tokens=60))
        loop.turn()
        for _ in range(num_answered):
            loop.answer(link)
            loop.turn()
    withhold(loop, "here:1", 22)
    if num_answered is None:
        loop.engine.submit(loop.group("long", num_tokens=60))
    loop.engine.submit(loop.group("small"))
    for _ in range(20):
        loop.turn()
        while worker.in_flight:
            loop.answer(link)
            loop.turn()
    assert len(loop.token_ids["small"]) == 9, "who fits is not held up"
    assert len(loop.token_ids.get("long", [])) < 9 and not loop.ends
    assert len(worker.scheduler.blocks.allocator.withheld) == 22, "what it had was given up"
    withhold(loop, "here:1", 0)
    loop.run_to_end(link)
    assert len(loop.token_ids["long"]) == 9


def test_a_worker_that_starts_over_keeps_them() -> None:
    loop = Loop()
    loop.join("here:1")
    loop.turn()
    (worker,) = loop.engine.workers
    worker.scheduler.columns.max_model_len = 40
    withhold(loop, "here:1", 5)
    worker.start_over()
    assert len(worker.scheduler.blocks.allocator.withheld) == 5
