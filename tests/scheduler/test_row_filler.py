"""What a step computes of the groups that run."""

from __future__ import annotations

from scheduler_svc.core.step_plan import SchedulingBudget, StepPlan
from tests.scheduler.simulation import Simulation


def begun(*num_tokens: int, num_blocks: int = 40) -> Simulation:
    """Groups with slots, of which nothing is computed: their first step had a budget of a token each."""
    simulation = Simulation(
        num_slots=4, num_blocks=num_blocks, block_size=4, max_model_len=80, max_num_batched_tokens=64
    )
    for number, count in enumerate(num_tokens):
        simulation.add([1 + number] * count, 8, eos_token_id=None)
    for group in simulation.groups:
        simulation.waiting.remove(group)
        simulation.scheduler.groups.seat(group, 1)
    return simulation


def plan_of(num_tokens: int, num_rows: int = 8) -> StepPlan:
    return StepPlan(SchedulingBudget(num_tokens, num_rows))


def test_prompts_are_continued_oldest_first_as_far_as_the_budget_reaches() -> None:
    simulation, plan = begun(10, 10, 10), plan_of(15)
    simulation.scheduler._rows.add_chunks(plan, None, set())
    assert [(chunk.sequence.group, chunk.query_len, chunk.num_samples) for chunk in plan.chunks] == [
        (simulation.groups[0], 10, 1),
        (simulation.groups[1], 5, 0),
    ]
    assert plan.budget.is_spent
    plan = plan_of(15, num_rows=1)
    simulation.scheduler._rows.add_chunks(plan, None, set())
    assert [chunk.sequence.group for chunk in plan.chunks] == [simulation.groups[1]], "rows are counted, too"


def test_only_who_has_the_step_to_itself_gets_rows_and_nobody_on_trial_otherwise() -> None:
    simulation = begun(10, 10)
    first, second = simulation.groups
    alone, others = plan_of(4), plan_of(4)
    simulation.scheduler._rows.add_chunks(alone, {second}, {second})
    simulation.scheduler._rows.add_chunks(others, None, {second})
    assert [chunk.sequence.group for chunk in alone.chunks] == [second]
    assert [chunk.sequence.group for chunk in others.chunks] == [first]


def test_a_prompt_takes_blocks_from_those_that_began_later_and_never_from_its_elders() -> None:
    simulation = begun(24, 24, num_blocks=7)
    first, second = simulation.groups
    simulation.scheduler._rows.add_chunks(plan_of(8), {second}, set())
    plan = plan_of(64)
    simulation.scheduler._rows.add_chunks(plan, None, set())
    assert [(chunk.sequence.group, chunk.query_len) for chunk in plan.chunks] == [(first, 24)]
    assert simulation.blocks.num_free_blocks == 1 and second not in simulation.scheduler.groups.running


def test_decodes_take_one_token_and_a_block_at_its_border() -> None:
    simulation = begun(4)
    rows, blocks = simulation.scheduler._rows, simulation.blocks
    rows.add_chunks(plan_of(64), None, set())
    assert blocks.num_free_blocks == 39
    for num_left in (38, 38, 38, 38, 37):  # the fifth token is the first of its block
        plan = plan_of(64)
        rows.add_decodes(plan, None, set())
        assert len(plan.decode_slots) == 1 and plan.budget.tokens_left == 63
        assert blocks.num_free_blocks == num_left


def test_what_decodes_have_filled_is_found_while_they_go_on_and_at_their_end_all_of_it() -> None:
    simulation = Simulation(num_slots=4, num_blocks=40, depth=1)
    runs = simulation.add([1] * 3, 6, eos_token_id=None)
    for num_found in (0, 0, 1, 1, 1, 2):
        simulation.send()
        simulation.answer()
        tokens = runs.sequences[0].token_ids.tolist()
        again = simulation.add([*tokens, 1], 1)
        assert len(simulation.blocks.find(again.sequences[0])) == num_found, len(tokens)
        simulation.abort(again)
    assert runs.is_finished


def test_an_output_takes_blocks_from_a_sibling_that_is_half_computed() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    group = simulation.add([1] * 4, 20, eos_token_id=None, n=2, resumed=[[2] * 12, [3] * 12])
    simulation.waiting.remove(group)
    simulation.scheduler.groups.seat(group, 2)
    first, second = group.sequences
    simulation.scheduler._rows.add_chunk(plan_of(15), second)
    assert len(second.block_table) == 4 and simulation.blocks.num_free_blocks == 2
    plan = plan_of(64)
    simulation.scheduler._rows.add_chunk(plan, first)
    assert [chunk.query_len for chunk in plan.chunks] == [16 - 4], "what both have is found"
    assert second.slot < 0 and plan.num_preempted == 1 and group in simulation.scheduler.groups.running
    simulation.scheduler.check_integrity()


def test_a_prompt_takes_blocks_from_beams_that_began_later() -> None:
    simulation = Simulation(num_blocks=7, block_size=4, max_num_batched_tokens=64)
    first, beams = simulation.add([1] * 24, 8), simulation.add([2] * 24, 8, beam_width=2)
    for group in (first, beams):
        simulation.waiting.remove(group)
        simulation.scheduler.groups.seat(group, 2)
    simulation.scheduler._rows.add_group(plan_of(8), beams)
    plan = plan_of(64)
    simulation.scheduler._rows.add_group(plan, first)
    assert [(chunk.sequence.group, chunk.query_len) for chunk in plan.chunks] == [(first, 24)]
    assert beams in simulation.scheduler.groups.preempted


def test_a_step_that_takes_no_block_tells_of_none() -> None:
    simulation = Simulation(depth=1)
    simulation.add([1] * 5, 3, eos_token_id=None)
    for _ in range(2):
        simulation.send()
        simulation.answer()
    outputs = simulation.sent[-1][0]
    told = (outputs.appended_slots, outputs.appended_counts, outputs.appended_blocks, outputs.copies, outputs.replaced)
    assert [len(each) for each in told] == [0] * 5 and outputs.rows.num_decode_rows == 1
