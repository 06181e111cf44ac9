"""How running groups give way, and steps of prompts or decodes without chunked prefill."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.preemption_modes import Costs
from scheduler_svc.core.prompt_delay import PromptDelay
from scheduler_svc.core.step_plan import SchedulingBudget, StepPlan
from tests.scheduler.simulation import Simulation


def crowded(**options: Any) -> Simulation:
    """Three groups, each of which comes to need 15 of 16 blocks, run to their ends."""
    simulation = Simulation(num_slots=3, num_blocks=16, max_num_batched_tokens=64, **options)
    for number in range(3):
        simulation.add([number] * 17, 40, eos_token_id=None)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    assert simulation.num_preempted == sum(group.num_preemptions for group in simulation.groups) > 0
    return simulation


def test_what_is_swapped_out_is_swapped_in():
    worker = crowded(preemption_mode="swap", num_host_blocks=40).worker
    assert worker.num_swapped_out == worker.num_swapped_in > 0


def test_without_host_blocks_groups_are_computed_again():
    swapped = crowded(preemption_mode="swap", num_host_blocks=40)
    computed = crowded(preemption_mode="swap", num_host_blocks=3, enable_prefix_caching=False)
    assert computed.worker.num_swapped_out == 0
    assert swapped.num_computed_tokens == 3 * 56 < computed.num_computed_tokens


@pytest.mark.parametrize("num_wanted", [60, 80])
def test_nobody_gives_way_for_one_that_cannot_come_in_all_the_same(num_wanted: int) -> None:
    """The most urgent group, which stays, holds 15 to 30 of 32 blocks; three patient ones hold 3 to 5 each."""
    simulation = Simulation(
        num_slots=8, max_model_len=128, block_size=4, num_blocks=32, policy="priority", max_num_batched_tokens=64
    )
    simulation.add(list(range(2, 62)), 60, None, priority=-1)
    patient = [simulation.add([2 + number] * 8, 12, None, priority=1) for number in range(3)]
    for _ in range(3):
        simulation.send()
        simulation.answer()
    before = [group.num_preemptions for group in patient]
    wanted = simulation.add([70] * num_wanted, 4, None, priority=0)
    simulation.send()
    gave_way = sum(group.num_preemptions for group in patient) - sum(before)
    assert (gave_way > 0) == (wanted.first_scheduled_ns is not None) == (num_wanted == 60)
    simulation.answer()
    simulation.run_to_end()
    simulation.check_outputs()


@pytest.mark.parametrize(
    ("costs", "swaps"),
    [
        (Costs(prefill_tokens_per_s=100, swap_bytes_per_s=1_000, block_bytes=1), True),  # 0.01 s a token, 0.002 a block
        (Costs(prefill_tokens_per_s=100_000, swap_bytes_per_s=1_000, block_bytes=1), False),
        (Costs(), False),  # nothing was measured
    ],
)
def test_auto_takes_the_cheaper_way(costs, swaps):
    simulation = crowded(preemption_mode="auto", num_host_blocks=40, costs=costs)
    assert (simulation.worker.num_swapped_out > 0) is swaps


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_a_group_that_has_just_come_back_is_not_the_next_victim(preemption_mode):
    simulation = Simulation(
        num_slots=3,
        num_blocks=16,
        num_host_blocks=40,
        max_num_batched_tokens=64,
        depth=1,
        preemption_mode=preemption_mode,
    )
    elder = simulation.add([1] * 9, 20, eos_token_id=None)
    younger = simulation.add([2] * 9, 20, eos_token_id=None)
    for _ in range(3):
        simulation.send()
        simulation.answer()
    preemption = simulation.scheduler._preemption
    assert preemption.choose_victim() is younger
    assert preemption.preempt(younger) is (preemption_mode == "swap")
    while younger not in simulation.scheduler.groups.running:
        assert simulation.send()
    assert preemption.choose_victim() is elder
    while younger.sequences[0].num_tokens < 14:
        simulation.answer()
        simulation.send()
    assert preemption.choose_victim() is younger
    simulation.run_to_end()
    simulation.check_outputs()


def test_without_chunked_prefill_no_step_mixes_prompts_with_decodes():
    simulation = Simulation(enable_chunked_prefill=False, num_blocks=60)
    for number in range(6):
        simulation.add([number] * 10, 9, eos_token_id=None)
    simulation.now_ns = 1
    simulation.run_to_end()
    simulation.check_outputs()
    kinds = [(outputs.rows.num_decode_rows, len(outputs.rows)) for outputs, _ in simulation.sent]
    assert all(num_decodes in (0, num_rows) for num_decodes, num_rows in kinds)
    assert kinds[:4] == [(0, 1)] * 4, "prompts come first, each of them whole"


def test_prompts_wait_by_the_delay_factor():
    simulation = Simulation(enable_chunked_prefill=False, delay_factor=2.0, depth=1)

    def sends_a_prompt_at(now_ns: int) -> bool:
        simulation.now_ns = now_ns
        assert simulation.send()
        simulation.answer()
        return simulation.sent[-1][0].rows.num_decode_rows == 0

    simulation.now_ns = 1000
    simulation.add([1] * 5, 20, eos_token_id=None)
    assert sends_a_prompt_at(1000)
    assert not sends_a_prompt_at(1100), "the prompt took 100 ns"
    simulation.add([2] * 5, 5)
    assert not sends_a_prompt_at(1299)
    assert sends_a_prompt_at(1300)


def test_without_a_delay_a_prompt_goes_into_the_step_of_the_instant_in_which_it_comes():
    simulation = Simulation(enable_chunked_prefill=False, depth=1)
    simulation.add([1] * 5, 20, eos_token_id=None)
    for number, now_ns in enumerate((1000, 1100, 1200)):
        simulation.now_ns = now_ns
        simulation.add([2 + number] * 5, 20, eos_token_id=None)
        assert simulation.send()
        simulation.answer()
        assert simulation.sent[-1][0].rows.num_decode_rows == 0


def test_a_step_of_prompts_lasts_until_its_answer_also_where_another_one_is_sent_meanwhile():
    simulation = Simulation(enable_chunked_prefill=False, delay_factor=2.0, depth=2)
    simulation.now_ns = 1000
    simulation.add([1] * 5, 20, eos_token_id=None)
    simulation.send()
    simulation.now_ns = 1001
    simulation.send()
    simulation.now_ns = 1100
    simulation.answer()
    simulation.send()  # notices that it took 100 ns
    late = simulation.add([2] * 5, 5)
    for now_ns, comes in ((1299, False), (1300, True)):
        simulation.now_ns = now_ns
        simulation.answer()
        simulation.send()
        assert (late in simulation.scheduler.groups.running) is comes


def test_before_a_step_was_measured_no_prompt_waits() -> None:
    delay = PromptDelay(2.0)
    assert delay.is_over(5, 5)


def test_a_step_of_prompts_that_fails_has_ended_too() -> None:
    simulation = Simulation(enable_chunked_prefill=False, delay_factor=2.0, depth=1)
    simulation.add([1] * 5, 20, eos_token_id=None)
    simulation.now_ns = 1000
    simulation.send(fails="before")
    simulation.answer()
    simulation.now_ns = 1100
    for _ in range(2):  # that of a suspect starts no prompts, and so does not look
        simulation.send()
        simulation.answer()
    delay = simulation.scheduler._delay
    assert not delay.is_over(1000, 1199) and delay.is_over(1000, 1200), "it took 100 ns"


def test_decodes_go_on_beside_a_long_prompt():
    simulation = Simulation(num_blocks=64, max_num_batched_tokens=16, depth=1)
    for number in range(3):
        simulation.add([number] * 3, 30, eos_token_id=None)
    simulation.send()
    simulation.answer()
    long = simulation.add([9] * 60, 2)
    steps = 0
    while long.sequences[0].num_tokens == 60:
        simulation.send()
        rows = simulation.sent[-1][0].rows
        assert rows.num_decode_rows == 3 and int(rows.query_lens.sum()) <= 16
        simulation.answer()
        steps += 1
    assert steps == 5, "13 tokens of the prompt in each"


@pytest.mark.parametrize(("n", "num_elder_tokens"), [(2, 9), (3, 9), (2, 37), (3, 33)])
def test_siblings_that_are_swapped_out_before_they_write_copy_the_block_that_they_share_on_return(n, num_elder_tokens):
    """The end of the prompt lies in one block of them all, on the host as on the device."""
    simulation = Simulation(num_slots=4, num_blocks=14, num_host_blocks=14, preemption_mode="swap", depth=1)
    simulation.add([1] * num_elder_tokens, 4, eos_token_id=None)
    siblings = simulation.add([2] * 9, 6, eos_token_id=None, n=n)
    while any(sequence.slot < 0 for sequence in siblings.sequences):
        simulation.send()
        simulation.answer()
    assert len(simulation.blocks.blocks_held(siblings)) == 3, "12 tokens' worth, for all of them"
    assert simulation.scheduler._preemption.preempt(siblings), "swapped out"
    simulation.run_to_end()
    assert simulation.worker.num_swapped_out == simulation.worker.num_swapped_in >= 3
    simulation.check_outputs()
    simulation.check_nothing_left()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_is_swapped_out_goes_on_from_what_it_has_whatever_its_slot(place):
    simulation = Simulation(num_blocks=24, num_host_blocks=24, preemption_mode="swap", depth=1, num_slots=3)
    groups = [simulation.add([1 + number] * 5, 12, eos_token_id=None) for number in range(3)]
    for _ in range(3):
        simulation.send()
        simulation.answer()
    victim = groups[place]
    assert victim.sequences[0].slot == place and simulation.scheduler._preemption.preempt(victim), "swapped out"
    simulation.run_to_end()
    assert simulation.num_computed_tokens == 3 * 16, "nothing is computed again"
    simulation.check_outputs()
    simulation.check_nothing_left()


@pytest.mark.parametrize(("bytes_per_s", "swaps"), [(5, True), (3, False)])
def test_what_siblings_share_is_reckoned_once(bytes_per_s: float, swaps: bool) -> None:
    """Two blocks there and back against eight tokens, and not against three times as many."""
    costs = Costs(prefill_tokens_per_s=1, swap_bytes_per_s=bytes_per_s, block_bytes=8)
    simulation = Simulation(num_slots=4, num_blocks=24, num_host_blocks=24, depth=1, costs=costs)
    siblings = simulation.add([2] * 8, 6, eos_token_id=None, n=3)
    simulation.send()
    simulation.answer()
    assert len(simulation.blocks.blocks_held(siblings)) == 2
    assert simulation.scheduler._preemption.preempt(siblings) is swaps


@pytest.mark.parametrize("num_running", [1, 2])
def test_only_who_has_the_cache_alone_starts_over_where_nobody_gets_on(num_running: int) -> None:
    simulation = Simulation(num_slots=4, num_blocks=16)
    for number in range(num_running):
        simulation.waiting.remove(group := simulation.add([number] * 5, 3))
        simulation.scheduler.groups.seat(group, 1)
    plan = StepPlan(SchedulingBudget(16, 4))
    simulation.scheduler._preemption.start_over_if_stuck(plan)
    is_stuck = num_running == 1
    assert len(simulation.scheduler.groups.preempted) == plan.num_preempted == group.num_preemptions == is_stuck
    simulation.run_to_end()
    simulation.check_outputs()


def test_beams_whose_answer_is_on_its_way_are_computed_again_and_not_swapped() -> None:
    simulation = Simulation(num_blocks=24, num_host_blocks=24, preemption_mode="swap", depth=1)
    beams = simulation.add([1] * 5, 6, eos_token_id=None, beam_width=2)
    simulation.send()
    simulation.answer()
    simulation.send()
    assert not simulation.scheduler._preemption.preempt(beams)
    simulation.run_to_end()
    simulation.check_outputs()
    assert simulation.worker.num_swapped_out == 0


@pytest.mark.parametrize("parent_ends", [False, True])
def test_outputs_that_a_failed_step_forked_are_forked_again_where_their_parent_still_runs(parent_ends: bool) -> None:
    simulation = Simulation(depth=1)
    group = simulation.add([1] * 5, 6, eos_token_id=None, n=3)
    simulation.send(fails="before")
    if parent_ends:
        simulation.scheduler.finish(group.sequences[0])
    simulation.answer()
    groups = simulation.scheduler.groups
    assert (group in groups.preempted, group in groups.unforked) == (parent_ends, not parent_ends)
    assert groups.num_seated(group) == (not parent_ends)
    simulation.run_to_end()
    simulation.check_nothing_left()
