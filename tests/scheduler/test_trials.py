"""Whose a step is, after a worker was lost or a step failed."""

from __future__ import annotations

from collections import deque

from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import SchedulingBudget, StepPlan
from scheduler_svc.core.trials import MAX_ON_TRIAL
from tests.scheduler.simulation import Simulation


def lossy(num_losses: list[int], num_others: int = 0) -> tuple[Simulation, list[SequenceGroup], list[SequenceGroup]]:
    """Groups that wait, one for each number of workers lost over it, and others that never lost any."""
    simulation = Simulation(num_slots=16, num_blocks=128, max_num_batched_tokens=256)
    lost = [simulation.add([1 + number] * 3, 20, eos_token_id=None) for number in range(len(num_losses))]
    for group, count in zip(lost, num_losses, strict=True):
        simulation.waiting.remove(group)
        for _ in range(count):
            group.lost_worker(2)
        simulation.waiting.push(group)
    others = [simulation.add([60 + number] * 3, 20, eos_token_id=None) for number in range(num_others)]
    return simulation, lost, others


def who_is_next(simulation: Simulation) -> set[SequenceGroup]:
    """Whose the next step is, answered before the one after it is made."""
    assert simulation.send()
    rows = simulation.in_flight[-1][0]
    groups = simulation.groups_of(rows)
    while simulation.in_flight:
        simulation.answer()
    return set(groups)


def test_those_who_lost_one_worker_are_tried_together_but_not_too_many() -> None:
    simulation, lost, _ = lossy([1] * (MAX_ON_TRIAL + 1))
    assert who_is_next(simulation) == set(lost[:MAX_ON_TRIAL])


def test_who_lost_two_workers_is_tried_alone() -> None:
    simulation, lost, _ = lossy([2, 1, 1])
    assert who_is_next(simulation) == {lost[0]}
    simulation, lost, _ = lossy([1, 2, 1])
    assert who_is_next(simulation) == {lost[0]}, "not even with one that lost one"


def test_every_second_step_is_that_of_the_others() -> None:
    simulation, lost, others = lossy([1], num_others=2)
    steps = [who_is_next(simulation) for _ in range(4)]
    assert steps == [set(lost), set(others), set(lost), {*lost, *others}], "after two tokens it has passed"


def test_the_step_of_the_others_is_not_for_the_next_on_trial() -> None:
    simulation, lost, others = lossy([2, 1], num_others=1)
    steps = [who_is_next(simulation) for _ in range(4)]
    assert steps == [{lost[0]}, set(others), {lost[0]}, {lost[0], *others}], "after two tokens it has passed"
    assert who_is_next(simulation) == {lost[1]}


def test_where_nobody_else_has_anything_to_do_no_step_is_left_out() -> None:
    simulation, lost, _ = lossy([1])
    assert [who_is_next(simulation) for _ in range(2)] == [set(lost)] * 2
    assert simulation.scheduler.trials.alone(simulation.waiting) is None and not simulation.scheduler.trials.on_trial


def test_each_group_of_a_failed_step_has_the_next_ones_to_itself_in_order() -> None:
    simulation, _, others = lossy([], num_others=3)
    assert who_is_next(simulation) == set(others)
    simulation.scheduler.groups.suspects.extend(others[:2])
    assert [who_is_next(simulation) for _ in range(3)] == [{others[0]}, {others[1]}, set(others)]


def run_until_tried(group: SequenceGroup, simulation: Simulation) -> None:
    """It loses a worker and comes back beside those who run; the next step is that of the others."""
    simulation.waiting.remove(group)
    group.lost_worker(20)
    simulation.waiting.push(group)
    while who_is_next(simulation) != {group}:
        assert not group.is_finished


def test_a_slot_that_is_free_at_last_brings_no_row_of_a_trial_into_the_step_of_others() -> None:
    simulation = Simulation(num_slots=3, num_blocks=128, max_num_batched_tokens=64)
    for max_tokens in (30, 3):
        simulation.add([70 + max_tokens] * 3, max_tokens, eos_token_id=None)
    assert len(who_is_next(simulation)) == 2
    group = simulation.add([1] * 3, 25, eos_token_id=None, n=2)
    run_until_tried(group, simulation)
    assert sum(sequence.slot >= 0 for sequence in group.unfinished()) == 1, "two slots are taken"
    while sum(sequence.slot >= 0 for sequence in group.unfinished()) < 2:
        assert simulation.send(), "which fails where rows of a trial and of others meet"
        simulation.answer()
    simulation.run_to_end()
    simulation.check_outputs()


def test_who_gives_way_to_a_more_urgent_group_and_is_back_at_once_has_steps_of_its_own_still() -> None:
    simulation = Simulation(num_slots=4, num_blocks=128, max_num_batched_tokens=64, policy="priority")
    simulation.add([70] * 3, 30, eos_token_id=None)
    assert len(who_is_next(simulation)) == 1
    group = simulation.add([1] * 3, 25, eos_token_id=None, n=3, priority=2)
    run_until_tried(group, simulation)
    urgent = simulation.add([80] * 3, 5, eos_token_id=None)
    assert group not in who_is_next(simulation) and group in simulation.scheduler.trials.on_trial
    assert group.num_preemptions == 1 and simulation.scheduler.groups.holds(urgent)
    assert who_is_next(simulation) == {group}
    simulation.run_to_end()
    simulation.check_outputs()


def with_blocks_taken(num_tokens: list[int], num_blocks: int) -> tuple[Simulation, list[SequenceGroup]]:
    """Groups that run, of which the first has nothing computed and the others all of their prompts."""
    simulation = Simulation(num_slots=4, num_blocks=num_blocks, max_num_batched_tokens=64)
    groups = [simulation.add([1 + number] * count, 8, eos_token_id=None) for number, count in enumerate(num_tokens)]
    for group in groups:
        simulation.waiting.remove(group)
        simulation.scheduler.groups.seat(group, 1)
    for group in groups[1:]:
        simulation.scheduler._rows.add_group(StepPlan(SchedulingBudget(64, 4)), group)
    simulation.scheduler.trials.on_trial = {groups[0]}
    return simulation, groups


def test_for_who_runs_alone_others_give_their_blocks_up_the_last_first_and_no_more_than_needed() -> None:
    simulation, (tried, second, third) = with_blocks_taken([8, 8, 8], num_blocks=4)
    plan, trials = StepPlan(SchedulingBudget(64, 4)), simulation.scheduler.trials
    trials.make_way_for(plan, trials.on_trial)
    assert [(chunk.sequence.group, chunk.query_len) for chunk in plan.chunks] == [(tried, 8)]
    assert simulation.scheduler.groups.running == {tried, second} and trials.on_trial == {tried}
    assert simulation.scheduler.groups.preempted == [third] and plan.num_preempted == third.num_preemptions == 1
    simulation.scheduler.check_integrity()


def test_a_step_of_who_runs_alone_takes_the_blocks_of_those_who_pause() -> None:
    simulation, (tried, second) = with_blocks_taken([8, 8], num_blocks=2)
    tried.lost_worker(20)
    outputs = simulation.scheduler.schedule(simulation.waiting, 0)
    assert outputs is not None and simulation.groups_of(outputs.rows) == {tried}
    assert simulation.scheduler.groups.preempted == [second] and outputs.num_preempted == 1
    simulation.scheduler.check_integrity()


def test_a_step_that_was_never_sent_is_taken_back_and_makes_nobody_a_suspect() -> None:
    simulation, _, (first, second, third) = lossy([], num_others=3)
    assert simulation.send()
    suspects = simulation.scheduler.groups.suspects = deque([second, first])
    simulation.scheduler.take_back(simulation.in_flight.pop()[0])
    assert simulation.scheduler.groups.suspects == suspects and third in simulation.scheduler.groups.running
    simulation.scheduler.check_integrity()
    assert all(group.sequences[0].num_computed_tokens == 0 for group in (first, second, third))


def test_where_nobody_is_left_to_give_way_the_trial_is_over_and_everybody_goes_on() -> None:
    simulation, (tried,) = with_blocks_taken([8], num_blocks=4)
    kept = simulation.blocks.allocator.allocate(4)
    plan, trials = StepPlan(SchedulingBudget(64, 4)), simulation.scheduler.trials
    trials.make_way_for(plan, trials.on_trial)
    assert not trials.on_trial and not plan.has_rows
    simulation.blocks.allocator.free(kept[:1])
    trials.on_trial = {tried}
    trials.make_way_for(plan, set())  # those that the step was for had to give way themselves
    assert [(chunk.sequence.group, chunk.query_len) for chunk in plan.chunks] == [(tried, 4)] and not trials.on_trial


def test_a_trial_that_has_the_cache_alone_and_cannot_get_on_starts_over() -> None:
    simulation, (tried,) = with_blocks_taken([16], num_blocks=4)
    tried.lost_worker(20)
    simulation.scheduler._rows.add_chunks(StepPlan(SchedulingBudget(8, 4)), {tried}, {tried})
    simulation.blocks.allocator.allocate(2)
    plan, trials = StepPlan(SchedulingBudget(64, 4)), simulation.scheduler.trials
    trials.try_after_all(plan, simulation.waiting, 0)
    assert simulation.scheduler.groups.preempted == [tried] and not trials.on_trial
    assert plan.num_preempted == tried.num_preemptions == 1 and not plan.has_rows


def test_decodes_go_on_too_where_a_trial_is_over() -> None:
    simulation, _, others = lossy([], num_others=2)
    assert who_is_next(simulation) == set(others)
    plan, trials = StepPlan(SchedulingBudget(64, 4)), simulation.scheduler.trials
    trials.on_trial = {others[0]}
    trials.make_way_for(plan, set())
    assert plan.decode_slots.tolist() == [0, 1] and not trials.on_trial
