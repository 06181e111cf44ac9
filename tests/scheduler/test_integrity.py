"""What the check of an idle worker's state finds: each kind of fault, wherever it is, a part of the cache at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.worker_groups import WorkerGroups
from scheduler_svc.engine import time_limits
from scheduler_svc.leases import worker_handle
from scheduler_svc.leases.worker_handle import WorkerHandle
from tests.scheduler.hand_turned_loop import FakeLink, Loop
from tests.scheduler.simulation import Simulation

NUM_BLOCKS, PART = 50, 16


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> WorkerHandle:
    """Of its blocks 0..39 are idle, 40..44 in use and cached, the others blank."""
    monkeypatch.setattr(worker_handle, "BLOCKS_CHECKED_AT_ONCE", PART)
    sizes = worker_pb2.InitializeResponse(
        num_device_blocks=NUM_BLOCKS, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64
    )
    info, lease = worker_pb2.WorkerInfo(block_size=4), worker_pb2.LeaseGranted(epoch=1)
    worker = WorkerHandle(FakeLink("worker"), info, sizes, lease, SchedulerSettings())
    blocks = worker.scheduler.blocks
    taken = blocks.allocator.allocate(45)
    blocks.cache.publish([bytes([number]) * 32 for number in range(45)], taken, np.full(45, -1, np.int32))
    blocks.allocator.free(taken[:40])
    columns = worker.scheduler.columns
    owner = SequenceGroup("one", [0] * 20, inference_pb2.SamplingParams(), max_num_tokens=20, arrival_ns=0).sequences[0]
    owner.attach(columns)
    columns.block_tables[0, :5], columns.num_blocks[0] = taken[40:], 5
    monkeypatch.setattr(worker.scheduler, "check_integrity", lambda part: blocks.check_integrity(set(), part))
    return worker


def is_found_in(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.cache._block_of[blocks.cache._hash_of[block]] = other  # type: ignore[index]  # it is cached


def has_another_hash(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.cache._hash_of[block] = blocks.cache._hash_of[other]


def has_no_hash(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.cache._hash_of[block] = None


def is_not_cached(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.cache.is_cached[block] = False


def is_idle_in_place_of(blocks: BlockSpaceManager, block: int, other: int) -> None:
    del blocks.allocator._idle[block]
    blocks.allocator._idle[44] = None


def is_lost(blocks: BlockSpaceManager, block: int, other: int) -> None:
    del blocks.allocator._idle[block]


def is_referenced(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.allocator.ref_counts[block] = 1


def is_blank_too(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.allocator._blank[0] = block


def is_blank_twice(blocks: BlockSpaceManager, block: int, other: int) -> None:
    blocks.allocator._blank[0] = blocks.allocator._blank[1]


FAULTS = (
    is_found_in,
    has_another_hash,
    has_no_hash,
    is_not_cached,
    is_idle_in_place_of,
    is_lost,
    is_referenced,
    is_blank_too,
    is_blank_twice,
)


def test_a_sound_state_passes_as_often_as_it_is_looked_at(worker):
    for _ in range(3 * NUM_BLOCKS // PART):
        worker.check_integrity()
    worker.scheduler.blocks.check_integrity(set())


@pytest.mark.parametrize("block", [0, PART - 1, PART, 39])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_found_once_all_parts_were_looked_at(
    worker: WorkerHandle, fault: Callable[[BlockSpaceManager, int, int], None], block: int
) -> None:
    fault(worker.scheduler.blocks, block, 20)
    with pytest.raises(AssertionError):
        worker.scheduler.blocks.check_integrity(set())
    with pytest.raises(AssertionError):
        for _ in range(-(-NUM_BLOCKS // PART)):
            worker.check_integrity()


def waits_for_slots_it_has(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.expanding.add(group)


def is_in_two_places(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.preempted.append(group)


def runs_no_more(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.running.remove(group)


def is_to_fork_and_wants_no_slots(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.unforked.add(group)


def has_nothing_to_prefill(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.prefilling.append(group.sequences[0])


def holds_a_free_slot(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.columns._free_slots.append(group.sequences[0].slot)


def has_a_free_block(groups: WorkerGroups, group: SequenceGroup) -> None:
    groups.blocks.allocator.free(group.sequences[0].block_table[-1:])


@pytest.mark.parametrize(
    "fault",
    [
        waits_for_slots_it_has,
        is_in_two_places,
        runs_no_more,
        is_to_fork_and_wants_no_slots,
        has_nothing_to_prefill,
        holds_a_free_slot,
        has_a_free_block,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_scheduler_whose_queues_slots_and_blocks_contradict_one_another_says_so(
    fault: Callable[[WorkerGroups, SequenceGroup], None],
) -> None:
    simulation = Simulation()
    group = simulation.add([1] * 9, 5)
    simulation.send()
    simulation.scheduler.check_integrity()
    fault(simulation.scheduler.groups, group)
    with pytest.raises(AssertionError):
        simulation.scheduler.check_integrity()


def test_broken_state_of_an_idle_worker_is_made_anew_and_the_worker_kept() -> None:
    now_ns = time.monotonic_ns()
    loop = Loop(clock=lambda: now_ns)
    link = loop.join()
    loop.turn()
    (worker,) = loop.engine.workers
    loop.submit("one")
    loop.turn()
    worker.checked_ns = 0  # long ago
    worker.scheduler.blocks.allocator.ref_counts[31] += 1
    loop.engine.take_events(0)
    assert loop.engine.workers == [worker], "it is busy"
    loop.engine.abort("one")
    loop.turn()
    while worker.in_flight:
        loop.answer(link)
        loop.turn()
    now_ns += time_limits.CHECK_SPACING_NS
    loop.engine.take_events(0)
    assert loop.engine.workers == [worker] and not link.is_closed
    worker.scheduler.check_integrity()
    loop.submit("two")
    loop.run_to_end(link)
    assert loop.token_ids["two"] == [7] * 9


def test_idle_workers_are_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 at once would hold up everybody else."""
    now_ns = time.monotonic_ns()
    loop = Loop(clock=lambda: now_ns)
    links = [loop.join(f"worker {number}") for number in range(64)]
    checked: list[WorkerHandle] = []
    monkeypatch.setattr(WorkerHandle, "check_integrity", lambda worker: checked.append(worker))
    loop.turn()
    assert len(loop.engine.workers) == 64 and not any(link.is_closed for link in links)
    checked.clear()
    for _ in range(110):  # over eleven seconds
        now_ns += 100_000_000
        for link in links:
            link.last_heard_ns = now_ns
        before = len(checked)
        for _ in range(5):  # a loop that is woken often
            loop.engine.take_events(0)
        assert len(checked) <= before + 1
    assert len(set(map(id, checked))) == 64, "each has its turn"
