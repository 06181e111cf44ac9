"""Whose a step is, after a worker was lost or a step failed."""

from __future__ import annotations

from scheduler_svc.core.sequence import SequenceGroup
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


def test_where_nobody_else_has_anything_to_do_no_step_is_left_out() -> None:
    simulation, lost, _ = lossy([1])
    assert [who_is_next(simulation) for _ in range(2)] == [set(lost)] * 2
    assert simulation.scheduler.trials.alone(simulation.waiting) is None and not simulation.scheduler.trials.on_trial


def test_each_group_of_a_failed_step_has_the_next_ones_to_itself_in_order() -> None:
    simulation, _, others = lossy([], num_others=3)
    assert who_is_next(simulation) == set(others)
    simulation.scheduler.groups.suspects.extend(others[:2])
    assert [who_is_next(simulation) for _ in range(3)] == [{others[0]}, {others[1]}, set(others)]
