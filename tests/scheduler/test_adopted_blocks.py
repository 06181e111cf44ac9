"""Blocks that a worker holds from earlier leases: what it may claim, and what a scheduler makes of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.leases.worker_claims import WrongClaim, check_cached

SIZES = worker_pb2.InitializeResponse(num_device_blocks=8)


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def lease(blocks: list[int], numbers: list[int]) -> worker_pb2.LeaseGranted:
    cached = worker_pb2.CachedBlocks(
        block_ids_u32=np.array(blocks, "<u4").tobytes(), hashes=b"".join(map(digest, numbers))
    )
    return worker_pb2.LeaseGranted(epoch=1, cached_blocks=cached)


def test_a_worker_may_have_none_or_some() -> None:
    check_cached(SIZES, worker_pb2.LeaseGranted(epoch=1))
    check_cached(SIZES, lease([7, 0, 3], [1, 2, 3]))


@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [([8], [1]), ([2, 2], [1, 2]), ([1, 2], [3, 3]), ([], [1]), ([1, 2, 3, 4, 5], [1, 2])],
    ids=["outside", "twice", "one content twice", "no block", "uneven"],
)
def test_a_worker_that_cannot_have_what_it_says_is_refused(blocks: list[int], numbers: list[int]) -> None:
    with pytest.raises(WrongClaim, match="cached block"):
        check_cached(SIZES, lease(blocks, numbers))
    broken = worker_pb2.LeaseGranted(epoch=1)
    broken.cached_blocks.block_ids_u32 = b"123"
    with pytest.raises(WrongClaim, match="within an entry"):
        check_cached(SIZES, broken)


@pytest.fixture
def allocator() -> BlockAllocator:
    allocator = BlockAllocator(8, PrefixCache(8))
    allocator.adopt([digest(1), digest(2), digest(3)], np.array([6, 1, 4], np.int32))
    allocator.check_integrity()
    return allocator


def test_adopted_blocks_are_found_and_given_up_in_the_order_of_their_use(allocator: BlockAllocator) -> None:
    cache = allocator.cache
    assert cache is not None and allocator.num_free == 8
    assert cache.find([digest(1), digest(2), digest(3)]) == [6, 1, 4]
    assert sorted(allocator.allocate(5).tolist()) == [0, 2, 3, 5, 7], "blank ones first"
    assert allocator.allocate(1).tolist() == [6]
    assert cache.find([digest(1)]) == [] and cache.find([digest(2)]) == [1]
    allocator.share(np.array([1], np.int32))
    assert allocator.allocate(1).tolist() == [4] and allocator.num_free == 0
    allocator.check_integrity()


def test_a_wrong_one_takes_all_others_along(allocator: BlockAllocator) -> None:
    """Which was computed upon which is not known any more; what was computed here upon one of them is."""
    mine = allocator.allocate(2)
    cache = allocator.cache
    assert cache is not None
    cache.publish([digest(8)], mine[:1], np.array([4], np.int32), 5)  # upon an adopted one
    cache.publish([digest(9)], mine[1:], np.array([-1], np.int32), 6)
    assert sorted(allocator.withdraw(np.array([6], np.int32))) == sorted([6, 1, 4, int(mine[0])])
    assert cache.find([digest(9)]) == mine[1:].tolist()
    allocator.check_integrity()
    assert not cache.is_adopted.any()


def test_a_wrong_one_of_ours_leaves_those_alone_that_it_was_computed_upon(allocator: BlockAllocator) -> None:
    mine = allocator.allocate(1)
    cache = allocator.cache
    assert cache is not None
    cache.publish([digest(8)], mine, np.array([4], np.int32), 5)
    assert allocator.withdraw(mine) == mine.tolist()
    assert cache.find([digest(3)]) == [4]


def group(**options: Any) -> SequenceGroup:
    return SequenceGroup(
        "r", list(range(8)), inference_pb2.SamplingParams(seed=1), max_num_tokens=9, arrival_ns=0, **options
    )


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from tests.scheduler.test_adopted_blocks import group\n"
        "print([group(**o).prompt_hashes(4)[1].hex() for o in ({}, {'cache_salt': 'a'})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hashes = [group(**options).prompt_hashes(4)[1].hex() for options in ({}, {"cache_salt": "a"})]
    assert done.stdout.strip() == str(hashes) and hashes[0] != hashes[1]


def test_what_is_computed_with_adapters_is_found_in_one_process_only() -> None:
    """Generations count what one scheduler has loaded: number 1 of another may be other weights."""
    code = (
        "from tests.scheduler.test_adopted_blocks import group\n"
        "it = group(adapter='a'); it.use_adapter_generation(1); print(it.prompt_hashes(4)[1].hex())"
    )
    mine, again = group(adapter="a"), group(adapter="a")
    mine.use_adapter_generation(1)
    again.use_adapter_generation(1)
    assert mine.prompt_hashes(4) == again.prompt_hashes(4)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() != mine.prompt_hashes(4)[1].hex()
