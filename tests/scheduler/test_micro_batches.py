"""What a step computes of a worker whose layers are in several stages: other sequences than the steps in flight."""

from __future__ import annotations

import numpy as np
import pytest

from protos import worker_pb2
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.leases.worker_handle import WorkerHandle
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.pool import PoolWorker, Size
from tests.scheduler.simulation import Simulation


def decoding(num_groups: int, num_stages: int) -> Simulation:
    """Groups whose prompts are computed; nothing is in flight."""
    simulation = Simulation(
        num_slots=num_groups,
        num_blocks=40 * num_groups,
        max_num_batched_tokens=256,
        depth=num_stages,
        num_micro_batches=num_stages,
    )
    for number in range(num_groups):
        simulation.add([1 + number] * 5, 40, eos_token_id=None)
    simulation.send()
    while simulation.in_flight:
        simulation.answer()
    return simulation


def fill(simulation: Simulation) -> list[int]:
    """Sends steps until as many are in flight as may be; rows of each."""
    sent = []
    while len(simulation.in_flight) < simulation.depth and simulation.send():
        sent.append(len(simulation.in_flight[-1][0]))
    return sent


@pytest.mark.parametrize(("num_groups", "num_stages", "shares"), [(8, 2, [4, 4]), (7, 3, [3, 3, 1]), (1, 2, [1])])
def test_decodes_are_dealt_out_evenly_and_go_round(num_groups: int, num_stages: int, shares: list[int]) -> None:
    simulation = decoding(num_groups, num_stages)
    assert fill(simulation) == shares
    for _ in range(12):
        slots = [rows.slots.tolist() for rows, _ in simulation.in_flight]
        assert sorted(slot for of_step in slots for slot in of_step) == list(range(num_groups)), (
            "each is in one micro-batch"
        )
        first = slots[0]
        simulation.answer()
        fill(simulation)
        assert simulation.in_flight[-1][0].slots.tolist() == first
    simulation.run_to_end()
    simulation.check_outputs()


@pytest.mark.parametrize("lengths", [(3, 3, 4), (3, 4, 3), (3, 3, 6)])
def test_a_micro_batch_that_gives_way_leaves_its_turn_to_others(lengths: tuple[int, ...]) -> None:
    """The one that has waited longest needs a block, there is none, and it is the latest: the first to give way."""
    simulation = Simulation(
        num_blocks=9, max_num_batched_tokens=32, depth=1, num_micro_batches=3, enable_prefix_caching=False
    )
    for number, length in enumerate(lengths):
        simulation.add([1 + number] * length, 30, eos_token_id=None)
    simulation.run_to_end()
    assert simulation.num_preempted > 0
    simulation.check_outputs()


def test_micro_batches_are_even_again_after_ends() -> None:
    simulation = decoding(12, 2)
    fill(simulation)
    ended = [simulation.columns.owner[slot].group for slot in simulation.in_flight[0][0].slots[:4].tolist()]
    for group in ended:
        simulation.abort(group)
    for _ in range(6):
        simulation.answer()
        fill(simulation)
    assert [len(rows) for rows, _ in simulation.in_flight] == [4, 4]


def test_who_has_waited_longest_comes_first() -> None:
    simulation = decoding(6, 2)
    simulation.columns.last_token_ns[:6] = [50, 10, 40, 20, 60, 30]
    simulation.send()
    assert simulation.in_flight[0][0].slots.tolist() == [1, 3, 5]


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    """They need nothing that is drawn."""
    simulation = Simulation(num_blocks=40, max_num_batched_tokens=8, depth=3, num_micro_batches=3)
    simulation.add(list(range(1, 25)), 4, eos_token_id=None)
    assert fill(simulation) == [1, 1, 1]
    assert [int(rows.query_lens[0]) for rows, _ in simulation.in_flight] == [8, 8, 8]
    simulation.run_to_end()
    simulation.check_outputs()


@pytest.mark.parametrize(("steps_in_flight", "shares"), [(1, [4, 4]), (2, [2, 2])])
def test_a_step_in_lock_step_has_all_decodes(steps_in_flight: int, shares: list[int]) -> None:
    """All but one stage are idle then: a part of the rows would take as long, and bring fewer tokens."""
    loop = Loop(steps_in_flight=steps_in_flight)
    loop.num_stages = 2
    link = loop.join()
    loop.submit("a", "b", "c", "d")
    loop.turn()
    for _ in range(2):
        loop.answer(link)
        loop.turn()
    assert [step.rows.num_decode_rows for step in link.steps[1:3]] == shares


@pytest.mark.parametrize(
    ("num_stages", "steps_in_flight", "expected"), [(0, 2, 2), (1, 2, 2), (4, 2, 4), (2, 3, 3), (4, 1, 1)]
)
def test_a_worker_has_a_step_for_each_stage_unless_in_lock_step(
    num_stages: int, steps_in_flight: int, expected: int
) -> None:
    sizes = worker_pb2.InitializeResponse(
        num_device_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, prefill_tokens_per_s=1e3
    )
    info = worker_pb2.WorkerInfo(block_size=4)
    info.parallel.pipeline_parallel_size = num_stages
    link = PoolWorker("worker", Size(8, 64, 0, 64, 64), 1, None, None, "", now_ns=0)
    worker = WorkerHandle(link, info, sizes, worker_pb2.LeaseGranted(epoch=1), SchedulerSettings())
    sent = 0
    while worker.can_take_step(steps_in_flight) and sent < 9:
        simulation = decoding(1, 1)
        simulation.send()
        worker.sent(worker.next_step_id, simulation.sent[-1][0], 0)
        sent += 1
    assert sent == expected
    assert np.all(worker.scheduler.columns.num_placeholders == 0)


@pytest.mark.parametrize(
    ("num_stages", "is_chunked", "expected"),
    [(1, True, 64), (2, True, 32), (3, True, 22), (16, True, 8), (2, False, 64)],
)
def test_stages_have_the_tokens_of_a_step_between_them(num_stages: int, is_chunked: bool, expected: int) -> None:
    """Never fewer than sequences, all of which may decode in one step."""
    sizes = worker_pb2.InitializeResponse(
        num_device_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, prefill_tokens_per_s=1e3
    )
    info = worker_pb2.WorkerInfo(block_size=4)
    info.parallel.pipeline_parallel_size = num_stages
    link = PoolWorker("worker", Size(8, 64, 0, 64, 64), 1, None, None, "", now_ns=0)
    settings = SchedulerSettings(enable_chunked_prefill=is_chunked)
    worker = WorkerHandle(link, info, sizes, worker_pb2.LeaseGranted(epoch=1), settings)
    assert worker.scheduler.max_num_batched_tokens == expected
    worker.set_budget(64)
    assert worker.scheduler.max_num_batched_tokens == expected
    worker.set_budget(8)
    assert worker.scheduler.max_num_batched_tokens == 8
