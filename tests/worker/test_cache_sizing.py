"""How many blocks there are, on the device and on the host, from plain numbers."""

from __future__ import annotations

from typing import Any

import pytest

from worker_svc.cache.cache_sizing import CacheSizes, Limits, size_cache
from worker_svc.config import WorkerConfig
from worker_svc.errors import StartupError
from worker_svc.host.memory import GIB

BLOCK = 1 << 20
STEP = 1 * GIB
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048)
MOST_BLOCKS = 256 * 128  # of 16 tokens


def sizes(available: float, block_bytes: int = BLOCK, limits: Limits = LIMITS, **options: Any) -> CacheSizes:
    return size_cache(WorkerConfig(**options), limits, block_bytes, int(available * GIB), STEP)


def on_gpu(available: float, host: float, **options: Any) -> CacheSizes:
    return size_cache(WorkerConfig(**options), LIMITS, BLOCK, int(available * GIB), STEP, int(host * GIB))


def test_a_gpus_cache_takes_all_that_steps_leave_and_swapped_blocks_the_hosts_memory():
    found = on_gpu(available=25, host=6)
    assert (found.num_device_blocks, found.num_host_blocks) == (24 * 1024, 2 * 1024)  # of 3 GiB: what is pinned
    assert on_gpu(available=60, host=100).num_device_blocks == MOST_BLOCKS


def test_a_share_of_the_host_is_no_share_of_a_gpu():
    found = on_gpu(available=25, host=6, memory_share=0.5)
    assert (found.num_device_blocks, found.num_host_blocks) == (24 * 1024, 1024)


def test_what_a_gpu_or_its_host_lacks_is_said():
    with pytest.raises(StartupError, match=r"cache takes 9 GiB, a step up to 1 GiB, but 9.5 GiB are free"):
        on_gpu(available=9.5, host=100, kv_cache_memory=9)
    with pytest.raises(
        StartupError, match=r"on the host: swapped blocks of 7 GiB take 8 GiB of .* but 7.5 GiB are free"
    ):
        on_gpu(available=25, host=7.5, swap_space=7)
    with pytest.raises(StartupError, match=r"too little memory for the cache: 0 GiB"):
        on_gpu(available=0.5, host=100)


def test_a_cache_that_was_set_too_small_is_said_by_its_option():
    wanted = r"a block takes 0\.000977 GiB, a sequence of 2048 tokens 0\.125 GiB"
    with pytest.raises(StartupError, match=f"^--kv-cache-memory 0.0001 is too little: {wanted}$"):
        sizes(available=21, kv_cache_memory=0.0001)


def test_ranks_of_one_host_take_as_much_each():
    config = WorkerConfig(kv_cache_memory=2, swap_space=1)

    def of_ranks(available: int, num_ranks: int, host: int | None = None) -> CacheSizes:
        host_bytes = None if host is None else host * GIB
        return size_cache(config, LIMITS, BLOCK, available * GIB, STEP, host_bytes, num_ranks)

    assert of_ranks(12, 3).num_device_blocks == 2048
    with pytest.raises(StartupError, match=r"too little memory for 4 ranks: the cache takes 2 GiB, .* 12 GiB are free"):
        of_ranks(12, 4)
    assert of_ranks(4, 3, host=3).num_host_blocks == 1024  # each has a GPU of its own
    with pytest.raises(StartupError, match=r"on the host for 4 ranks: swapped blocks of 1 GiB .* 3 GiB are free"):
        of_ranks(4, 4, host=3)


def test_the_default_is_4_gib_on_either_side():
    found = sizes(available=21)
    assert (found.num_device_blocks, found.num_host_blocks) == (4096, 4096)


def test_the_default_of_the_host_shrinks_to_half_of_what_cache_and_step_leave():
    assert sizes(available=6, kv_cache_memory=2).num_host_blocks == 1536  # 1.5 of 6 - 1 - 2 GiB
    found = sizes(available=6)
    assert (found.num_device_blocks, found.num_host_blocks) == (2048, 1536)


def test_the_default_of_the_host_is_no_more_than_all_sequences_need():
    assert sizes(available=21, block_bytes=1 << 10).num_host_blocks == MOST_BLOCKS


def test_neighbours_that_start_together_do_not_count_on_the_same_memory():
    one, two = sizes(available=12), sizes(available=12, memory_share=0.5)
    assert (one.num_device_blocks, one.num_host_blocks) == (4096, 3584)
    assert (two.num_device_blocks, two.num_host_blocks) == (2048, 1536)
    taken = 2 * (two.num_device_blocks + two.num_host_blocks) * BLOCK + 2 * STEP
    assert taken < 12 * GIB < 2 * (one.num_device_blocks + one.num_host_blocks) * BLOCK + 2 * STEP


def test_what_is_asked_for_has_to_fit_and_no_more():
    """A worker that is started again: its neighbour has filled its half."""
    assert sizes(available=12, kv_cache_memory=8, memory_share=0.5).num_device_blocks == 8192


@pytest.mark.parametrize(("asked", "num_blocks"), [(0, 0), (0.25, 256), (16, 16384)])
def test_what_is_asked_for_is_what_there_is(asked: float, num_blocks: int):
    assert sizes(available=21, swap_space=asked).num_host_blocks == num_blocks


def test_more_than_there_is_is_refused_with_the_numbers():
    with pytest.raises(StartupError, match=r"swapped blocks 17 GiB.* 21 GiB are free"):
        sizes(available=21, swap_space=17)


def test_no_room_left_is_no_host_blocks_and_no_refusal():
    assert sizes(available=3, kv_cache_memory=2).num_host_blocks == 0
