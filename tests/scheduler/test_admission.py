"""Which groups a worker takes, in which order, and when it has room for one."""

from __future__ import annotations

import pytest

from scheduler_svc.core.blocks.block_manager import AllocStatus
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.step_plan import Chunk, SchedulingBudget, StepPlan
from tests.scheduler.simulation import Simulation

BLOCK = 4


@pytest.mark.parametrize(
    ("num_tokens", "status"),
    [(15 * BLOCK, AllocStatus.OK), (16 * BLOCK, AllocStatus.OK), (16 * BLOCK + 1, AllocStatus.NEVER)],
)
def test_an_empty_worker_takes_what_its_whole_cache_holds(num_tokens: int, status: AllocStatus) -> None:
    simulation = Simulation(num_slots=2, num_blocks=16, block_size=BLOCK, max_model_len=80)
    group = simulation.add(list(range(num_tokens)), 1)
    assert simulation.scheduler._admission.can_admit(group) is status


def test_what_prompts_that_have_begun_still_lack_is_kept_for_them() -> None:
    simulation = Simulation(num_slots=4, num_blocks=20, block_size=BLOCK, max_model_len=80, max_num_batched_tokens=8)
    simulation.add([1] * 60, 1)
    fits, large = simulation.add([2] * 20, 1), simulation.add([3] * 21, 1)
    assert simulation.send() and simulation.blocks.num_free_blocks == 18, "two of its fifteen blocks are taken"
    assert simulation.scheduler._admission.can_admit(fits) is AllocStatus.OK
    assert simulation.scheduler._admission.can_admit(large) is AllocStatus.LATER


def test_without_a_free_slot_nobody_begins() -> None:
    simulation = Simulation(num_slots=1, num_blocks=40)
    first, second = simulation.add([1] * 3, 8, eos_token_id=None), simulation.add([2] * 3, 8, eos_token_id=None)
    assert simulation.send() and simulation.scheduler.groups.running == {first}
    assert simulation.scheduler._admission.can_admit(second) is AllocStatus.LATER


def test_who_comes_first_is_not_overtaken_by_one_that_would_fit() -> None:
    simulation = Simulation(num_slots=4, num_blocks=16, block_size=BLOCK)
    running = simulation.add([1] * 30, 8, eos_token_id=None)
    assert simulation.send()
    large, small = simulation.add([2] * 40, 2), simulation.add([3] * 3, 2)
    simulation.send()
    assert (
        simulation.scheduler.groups.running == {running} and small in simulation.waiting and large in simulation.waiting
    )


def test_who_gave_way_comes_back_before_those_who_are_new() -> None:
    simulation = Simulation(num_slots=2, num_blocks=40, depth=1, preemption_mode="recompute")
    stays, gave_way = (simulation.add([number] * 9, 20, eos_token_id=None) for number in (1, 2))
    simulation.send()
    simulation.answer()
    simulation.scheduler._preemption.preempt(gave_way)
    simulation.add([3] * 3, 2)
    simulation.send()
    assert simulation.scheduler.groups.running == {stays, gave_way}


@pytest.mark.parametrize(
    ("num_tokens", "num_trial_tokens", "num_slots", "leaves_room"),
    [(20, 20, 2, True), (20, 21, 2, False), (24, 17, 2, False), (20, 20, 1, False), (41, 1, 2, False)],
)
def test_who_is_new_leaves_room_for_one_on_trial_before_it(
    num_tokens: int, num_trial_tokens: int, num_slots: int, leaves_room: bool
) -> None:
    simulation = Simulation(num_slots=num_slots, num_blocks=10, block_size=BLOCK)
    trial, group = simulation.add([1] * num_trial_tokens, 1), simulation.add([2] * num_tokens, 1)
    earlier = simulation.add([3] * 40, 1)
    simulation.waiting.remove(trial)
    trial.lost_worker(20)
    admission = simulation.scheduler._admission
    assert admission._leaves_room_for_trial(group, simulation.waiting), "nobody is on trial"
    simulation.waiting.push(trial)
    assert admission._leaves_room_for_trial(group, simulation.waiting) is leaves_room
    earlier.order = 0
    assert admission._leaves_room_for_trial(earlier, simulation.waiting), "it is served before"


def test_a_tenant_is_charged_for_the_prompt_but_what_is_found_of_it() -> None:
    served = ServedTokens()
    simulation = Simulation(policy="fair", served=served, depth=1)
    for prompt, level in (([1] * 9, 9), ([1] * 9, 9 + 1 + 1)):
        simulation.add(prompt, 1, eos_token_id=None, tenant="tenant")
        simulation.send()
        assert served.level("tenant") == level
        simulation.answer()
    assert served.level("tenant") == 12, "and for what it was drawn"


@pytest.mark.parametrize(
    ("resumed", "charged", "charged_again"),
    [([[2] * 6], 9 + 6, 3), ([[2] * 6, [3] * 2], 9 + 6 + 2, 3 + 2), ([[], [2] * 6], 9 + 6, 1 + 3)],
)
def test_a_tenant_is_charged_for_the_prompt_once_and_for_what_each_output_brings_along(
    resumed: list[list[int]], charged: int, charged_again: int
) -> None:
    served = ServedTokens()
    simulation = Simulation(policy="fair", served=served, depth=1, num_slots=2, block_size=BLOCK)
    for num_tokens in (charged, charged_again):
        before = served.level("tenant")
        simulation.add([1] * 9, 10, eos_token_id=None, n=len(resumed), tenant="tenant", resumed=resumed)
        simulation.send()
        assert served.level("tenant") - before == num_tokens
        simulation.run_to_end()


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_only_where_prompts_are_computed_whole_a_late_sequence_waits_for_a_step_that_takes_it(
    enable_chunked_prefill: bool,
) -> None:
    simulation = Simulation(num_blocks=40, enable_chunked_prefill=enable_chunked_prefill)
    group = simulation.add([1] * 6, 9, eos_token_id=None, n=2, resumed=[[2], [3]])
    simulation.waiting.remove(group)
    simulation.scheduler.groups.seat(group, 1)
    plan = StepPlan(SchedulingBudget(6, 4), chunks=[Chunk(group.sequences[0], 3, 0)])
    assert simulation.scheduler._admission._seat_late(plan, {group}) is enable_chunked_prefill
    plan.budget.tokens_left += 1
    assert simulation.scheduler._admission._seat_late(plan, {group}) is not enable_chunked_prefill, "7 fit; one is late"
    assert all(sequence.slot >= 0 for sequence in group.sequences)


@pytest.mark.parametrize("somebody_runs", [False, True])
def test_only_an_idle_worker_gives_its_last_blocks_to_one_on_trial_and_one_beside_it(somebody_runs: bool) -> None:
    simulation = Simulation(num_slots=3, num_blocks=100 + somebody_runs, max_model_len=256)
    if somebody_runs:
        simulation.add([9] * 3, 2, eos_token_id=None)
        assert simulation.send()
    trial, group = simulation.add([1] * 200, 1), simulation.add([2] * 200, 1)
    simulation.waiting.remove(trial)
    trial.lost_worker(20)
    simulation.waiting.push(trial)
    admission = simulation.scheduler._admission
    assert admission._leaves_room_for_trial(group, simulation.waiting) is not somebody_runs
    assert simulation.blocks.num_free_blocks == 100 and simulation.blocks.watermark_blocks == 1
