"""The scheduler core against the worker's mirror: random traffic, and every invariant after every step."""

from __future__ import annotations

import gc
import random
import sys
from array import array
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import SchedulingBudget, StepPlan
from scheduler_svc.engine.messages.step_encoder import decode, encode
from tests.many import trials, without_end
from tests.scheduler.simulation import VOCAB_SIZE, Simulation, expected_tokens

prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)
requests = st.lists(st.tuples(prompts, st.integers(1, 30)), min_size=1, max_size=8)


@without_end
@given(requests, st.integers(1, 3), st.integers(4, 80), st.integers(16, 30), st.integers(1, 60))
@settings(max_examples=trials(50))
def test_every_request_gets_exactly_its_tokens(wanted, depth, budget, num_blocks, most_prompt_tokens):
    """Whatever depth, chunk size and cache: each group ends with the tokens that it would get alone."""
    sizes = {"max_num_batched_tokens": budget, "num_blocks": num_blocks, "most_prompt_tokens": most_prompt_tokens}
    simulation = Simulation(depth=depth, **sizes)
    for prompt, max_tokens in wanted:
        simulation.add(prompt, max_tokens)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_a_step_takes_no_more_of_prompts_than_it_may():
    """Beside decodes, which have the rest of it."""
    simulation = Simulation(num_slots=3, max_model_len=512, num_blocks=200, max_num_batched_tokens=120, depth=1)
    simulation.add([1] * 100, 20, eos_token_id=None)
    simulation.send()
    simulation.answer()
    simulation.add([2] * 200, 2, eos_token_id=None)
    simulation.add([3] * 200, 2, eos_token_id=None)
    for most, chunks in ((60, [60]), (150, [119]), (60, [21, 39])):
        simulation.most_prompt_tokens = most
        simulation.send()
        assert simulation.in_flight[0][0].query_lens.tolist() == [1, *chunks]
        simulation.answer()
    simulation.run_to_end()
    simulation.check_outputs()


@without_end
def test_nothing_leaks_over_hundreds_of_requests_with_aborts():
    rng = random.Random(5)
    simulation = Simulation(num_slots=8, num_blocks=40, max_num_batched_tokens=24)
    for _ in range(trials(150)):
        simulation.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))], rng.randint(1, 24))
        for _ in range(rng.randint(0, 4)):
            if len(simulation.in_flight) < simulation.depth:
                simulation.send()
            if simulation.in_flight and rng.random() < 0.8:
                simulation.answer()
            simulation.check()
        if rng.random() < 0.3:
            group = rng.choice(simulation.groups)
            if not group.is_finished:
                simulation.abort(group)
    simulation.run_to_end()
    simulation.check_nothing_left()
    assert simulation.num_preempted > 20, "the cache was meant to be too small"


@without_end
def test_a_small_cache_and_failing_steps_end_every_request():
    """Up to 30 % of the steps fail: groups are preempted with draws in flight that never come."""
    preempted = failed = 0
    for seed in range(trials(40)):
        rng = random.Random(seed)
        simulation = Simulation(
            num_blocks=rng.randint(16, 18), max_num_batched_tokens=rng.randint(4, 12), depth=rng.choice([1, 2, 3])
        )
        for _ in range(rng.randint(2, 5)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
            simulation.add(prompt, rng.randint(1, 30), eos_token_id=None)
        share = rng.random() * 0.3
        fails = iter([rng.choice(["before", "after"]) if rng.random() < share else None for _ in range(60)])
        simulation.run_to_end(partial(next, fails, None))
        simulation.check_outputs()
        simulation.check_nothing_left()
        preempted += simulation.num_preempted
        failed += sum(step.HasField("resume_after") for step in simulation.steps)
    assert preempted > 30 and failed > 30, "the histories were meant to be hard"


def test_full_metadata_beyond_the_message_limit_is_split_over_steps(monkeypatch):
    """At admission, and when every running sequence is introduced anew after a failed step."""
    monkeypatch.setattr("scheduler_svc.core.row_filler.MAX_INTRODUCED_BYTES", 1000)
    simulation = Simulation(num_slots=8, num_blocks=200, max_num_batched_tokens=500)
    for number in range(8):
        simulation.add([number] * 30, 20, eos_token_id=None)
    for fails in [None] * 5 + ["after"]:
        simulation.send(fails)
        simulation.answer()
    simulation.run_to_end()
    told = [sum(len(s.token_ids) for g in step.groups for s in g.sequences) for step in simulation.steps]
    assert max(told) <= 70 and sum(told) > 2 * 8 * 30
    for number, group in enumerate(simulation.groups):
        assert group.sequences[0].token_ids.tolist() == expected_tokens([number] * 30, 0, 50, eos=None)
    simulation.check_nothing_left()


def test_whatever_a_group_brings_counts_towards_the_size_of_a_step(monkeypatch):
    """Long lists of any kind, not only prompts; and each sequence that is told by itself brings them again."""
    limit = 60_000
    monkeypatch.setattr("scheduler_svc.core.row_filler.MAX_INTRODUCED_BYTES", limit)
    simulation = Simulation(num_slots=16, num_blocks=200, max_num_batched_tokens=500)
    ids = range(100_000, 101_000)
    for number in range(12):
        group = simulation.add([number] * 8, 6, eos_token_id=None, n=2 if number % 4 == 3 else 1)
        match number % 4:
            case 0:
                group.bad_words = tuple(array("I", [token_id, token_id]) for token_id in ids)
            case 1:
                group.stop_token_ids, group.sampling_params.min_tokens = frozenset(ids), 1
            case 2:
                group.sampling_params.logit_bias.update({token_id: 1.0 for token_id in ids})
            case 3:
                group.sampling_params.allowed_token_ids.extend(ids)
    for fails in [None] * 3 + ["after"]:
        simulation.send(fails)
        simulation.answer()
    simulation.run_to_end()
    sizes = [step.ByteSize() for step in simulation.steps if step.groups]
    assert max(sizes) <= limit < 2 * max(sizes), "and not much less"
    simulation.check_nothing_left()


def test_decodes_come_before_prompts_and_prompts_are_chunked():
    simulation = Simulation(num_slots=4, num_blocks=64, max_num_batched_tokens=8, depth=1)
    simulation.add([1, 2], 20, eos_token_id=None)
    simulation.send()
    simulation.answer()
    simulation.add(list(range(30)), 5)
    for _ in range(3):
        simulation.send()
        rows = simulation.sent[-1][0].rows
        assert rows.num_decode_rows == 1
        assert rows.query_lens.tolist() == [1, 7]
        simulation.answer()


def test_the_youngest_is_preempted():
    simulation = Simulation(num_slots=3, num_blocks=16, depth=1, max_num_batched_tokens=64)
    groups = [simulation.add([number] * 17, 40, eos_token_id=None) for number in range(3)]
    while not groups[2].num_preemptions:
        simulation.send()
        simulation.answer()
    assert [group.num_preemptions for group in groups] == [0, 0, 1]
    simulation.run_to_end()


def test_groups_that_lost_a_worker_are_tried_a_few_at_a_time_and_after_two_losses_alone():
    simulation = Simulation(num_slots=16, num_blocks=400, max_num_batched_tokens=200, depth=2)
    groups = [simulation.add([number] * 9, 30, eos_token_id=None) for number in range(12)]
    while len(simulation.in_flight) < 2:
        simulation.send()
    late = simulation.add([99] * 9, 30, eos_token_id=None)
    simulation.lose_worker()
    for group in groups[5:7]:
        group.lost_worker(simulation.depth + 1)  # another one, on its trial
    num_sent = len(simulation.sent)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    ran = [simulation.groups_of(outputs.rows) for outputs, _ in simulation.sent[num_sent:]]
    first, last = set(groups[:5]), set(groups[7:])
    # Each is tried until it is past the loss, and whoever is not on trial has every second step.
    assert ran[:6] == [first, {late}, first, {late}, first, {late, *first}]
    trials = [{groups[5]}, {groups[6]}, last]
    assert ran[6:23:2] == [trial for trial in trials for _ in range(3)]
    assert ran[7:23:2] == [{late, *groups[: 5 + len(passed)]} for passed in ("", "", "1", "1", "1", "12", "12", "12")]
    assert ran[23] == {*groups, late}


def test_who_has_passed_its_trial_is_charged_with_no_more_for_a_loss_in_the_company_of_others():
    group = Simulation().add([1] * 9, 30)
    group.lost_worker(0)
    assert not group.is_on_trial, "past where it was"
    group.lost_worker(3)
    assert (group.num_worker_losses, group.num_losses_in_all, group.is_on_trial) == (1, 2, True)
    group.lost_worker(3)
    assert (group.num_worker_losses, group.num_losses_in_all) == (2, 3)


def test_no_more_than_eight_are_tried_together():
    simulation = Simulation(num_slots=32, num_blocks=400, max_num_batched_tokens=400, depth=1)
    groups = [simulation.add([number] * 9, 30, eos_token_id=None) for number in range(20)]
    simulation.send()
    simulation.lose_worker()
    simulation.run_to_end()
    simulation.check_outputs()
    ran = [simulation.groups_of(outputs.rows) for outputs, _ in simulation.sent[1:]]
    assert [len(those) for those in ran[:11]] == [8, 8, 8, 8, 8, 8, 16, 4, 16, 4, 20]
    assert ran[0] | ran[3] | ran[7] == set(groups)


def test_a_group_on_trial_that_has_to_give_way_lets_the_others_go_on():
    simulation = Simulation(num_blocks=16, depth=1, max_num_batched_tokens=64, preemption_mode="recompute")
    simulation.add([1] * 30, 20, eos_token_id=None)
    younger = simulation.add([2] * 24, 30, eos_token_id=None)
    younger.lost_worker(25)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    assert younger.num_preemptions == 1


def lost(simulation: Simulation, group: SequenceGroup) -> SequenceGroup:
    """A group that waits, as if it came from a worker that was lost with it."""
    simulation.waiting.remove(group)
    group.lost_worker(4)
    simulation.waiting.push(group)
    return group


def test_one_on_trial_that_gives_way_to_another_is_on_trial_no_more():
    """The other's turn is the step after; a third one, for which there is no room beside that one, does not begin."""
    simulation = Simulation(num_blocks=16, depth=1, max_num_batched_tokens=4, policy="priority")
    first = lost(simulation, simulation.add([1] * 40, 8, eos_token_id=None, priority=1))
    for _ in range(2):
        simulation.send()
        simulation.answer()
    second = lost(simulation, simulation.add([2] * 40, 8, eos_token_id=None, priority=0))
    third = simulation.add([3] * 40, 8, eos_token_id=None, priority=0)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    assert [group.num_preemptions for group in (first, second, third)] == [1, 0, 0]


def test_who_gave_way_to_a_late_output_does_not_come_back_before_that_one_runs():
    simulation = Simulation(num_slots=3, num_blocks=16, depth=1, policy="priority", enable_chunked_prefill=False)
    patient = simulation.add([1] * 4, 12, eos_token_id=None, n=2, priority=1)
    simulation.send()
    simulation.answer()
    urgent = simulation.add([2] * 4, 12, eos_token_id=None, n=5, priority=0)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    assert (urgent.num_preemptions, patient.num_preemptions) == (0, 1)


def test_losses_at_any_time_change_no_token():
    """In caches so small that groups on trial, and those that pause for them, are in each other's way."""
    num_losses = num_tried = num_preempted = 0
    for seed in range(40):
        rng = random.Random(seed)
        mode = rng.choice(["swap", "recompute"])
        simulation = Simulation(
            num_slots=8,
            num_blocks=rng.randint(20, 24),
            num_host_blocks=40 if mode == "swap" else 0,
            preemption_mode=mode,
            max_num_batched_tokens=rng.randint(8, 40),
            depth=rng.choice([1, 2, 3]),
            num_micro_batches=1 + seed % 3,
        )
        for _ in range(rng.randint(4, 8)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
            n, beam_width = rng.choice([(1, 0), (1, 0), (2, 0), (1, 2)])
            simulation.add(prompt, rng.randint(1, 20), eos_token_id=None, n=n, beam_width=beam_width)
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(1, 40)):
                if len(simulation.in_flight) < simulation.depth:
                    simulation.send("after" if rng.random() < 0.02 else None)
                if simulation.in_flight and rng.random() < 0.8:
                    simulation.answer()
                simulation.check()
                num_tried += len(simulation.scheduler.trials.on_trial)
            simulation.lose_worker()
            num_losses += 1
        simulation.run_to_end()
        simulation.check_outputs()
        simulation.check_nothing_left()
        num_preempted += simulation.num_preempted
    assert num_losses > 80 and num_tried > 100 and num_preempted > 30


def one_draw_from_preemption(**younger: Any) -> tuple[Simulation, SequenceGroup, SequenceGroup]:
    """Two groups that fill the cache: the second step from here needs a block and preempts the younger group."""
    simulation = Simulation(num_slots=2, max_model_len=32, num_blocks=8, max_num_batched_tokens=64)
    elder, victim = simulation.add([1] * 15, 9, None), simulation.add([2] * 14, 9, None, **younger)
    simulation.send()
    simulation.answer()
    return simulation, elder, victim


@pytest.mark.parametrize("reason", [FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH])
def test_a_token_that_arrives_for_a_preempted_group_counts(reason):
    *first, last = expected_tokens([2] * 14, 0, 16, eos=None)
    assert last not in first
    stops = frozenset([last]) if reason is FinishReason.STOP else frozenset()
    simulation, elder, victim = one_draw_from_preemption(stop_token_ids=stops)
    if reason is FinishReason.LENGTH:
        victim.max_num_tokens = 16
        simulation.columns.max_num_tokens[victim.sequences[0].slot] = 16
    simulation.send()
    simulation.send()
    assert victim.num_pending_tokens == 1 and simulation.scheduler.groups.preempted == [victim]
    new = simulation.answer()
    assert new is not None
    assert [sequence.group for sequence in new.sequences] == [elder, victim]
    assert new.token_ids[1] == last and new.finish_reasons.tolist() == [FinishReason.NONE, reason]
    assert victim.sequences[0].token_ids.tolist() == [*first, last]
    assert victim.is_finished is (reason is not FinishReason.NONE)
    assert simulation.scheduler.groups.preempted == ([] if victim.is_finished else [victim])
    simulation.run_to_end()
    simulation.check_nothing_left()


def test_a_draw_that_failed_is_no_longer_awaited_by_a_preempted_group():
    simulation, _, victim = one_draw_from_preemption()
    simulation.send(fails="before")
    simulation.send()
    assert victim.num_pending_tokens == 1
    simulation.answer()
    assert victim.num_pending_tokens == 0
    simulation.answer()
    simulation.run_to_end()
    assert victim.sequences[0].token_ids.tolist() == expected_tokens([2] * 14, 0, 23, eos=None)


def test_after_a_failed_step_each_of_its_groups_runs_alone_until_its_own_answer():
    simulation = Simulation(num_blocks=64, max_num_batched_tokens=64)
    first, second, third = (simulation.add([number] * 5, 20, eos_token_id=None) for number in range(3))
    simulation.send()
    simulation.answer()
    simulation.send(fails="before")
    simulation.answer()
    scheduler = simulation.scheduler
    assert list(scheduler.groups.suspects) == [first, second, third]
    simulation.add([7], 5)  # newcomers wait
    simulation.send()
    simulation.send()
    simulation.answer()
    assert list(scheduler.groups.suspects) == [second, third]
    simulation.send()
    simulation.answer()  # the second one of the first group
    assert list(scheduler.groups.suspects) == [second, third]
    simulation.send()
    simulation.answer()
    assert list(scheduler.groups.suspects) == [third]
    simulation.answer()
    simulation.send()
    simulation.answer()
    assert not scheduler.groups.suspects
    alone = [simulation.groups_of(outputs.rows) for outputs, _ in simulation.sent[2:]]
    assert alone == [{first}, {first}, {second}, {second}, {third}]
    simulation.send()
    assert simulation.groups_of(simulation.sent[-1][0].rows) == set(simulation.groups)
    simulation.run_to_end()


def test_a_suspect_that_is_preempted_is_no_suspect_any_more():
    simulation, elder, victim = one_draw_from_preemption()
    simulation.send(fails="before")
    simulation.answer()
    assert list(simulation.scheduler.groups.suspects) == [elder, victim]
    simulation.send()
    simulation.send()  # needs a block
    assert simulation.scheduler.groups.preempted == [victim]
    assert list(simulation.scheduler.groups.suspects) == [elder]
    simulation.run_to_end()
    simulation.check_nothing_left()


@pytest.mark.parametrize("which", [0, 1])
def test_a_sequence_that_is_ended_before_its_prompt_is_computed_leaves_the_others_theirs(which):
    """The first one's row was to compute the prompt for all of them."""
    simulation = Simulation(max_num_batched_tokens=4)
    group = simulation.add([1] * 10, 5, eos_token_id=None, n=3)
    simulation.send(fails="before")
    simulation.answer()
    simulation.send()
    assert list(simulation.scheduler.groups.suspects) == [group]
    simulation.scheduler.finish(group.sequences[which])
    simulation.check()
    simulation.run_to_end()
    simulation.check_outputs(besides=[group])
    assert [len(simulation.outputs[group].get(index, ())) for index in range(3)] == [
        0 if index == which else 5 for index in range(3)
    ]
    simulation.check_nothing_left()


def test_an_output_goes_on_beside_a_sibling_that_is_half_computed():
    simulation = Simulation(max_num_batched_tokens=4, depth=1, num_blocks=40, enable_prefix_caching=False)
    prompt = [5] * 9
    halves = [expected_tokens(prompt, index, 12, eos=None)[9:] for index in range(2)]
    simulation.add(prompt, 12, eos_token_id=None, n=2, resumed=halves)
    simulation.run_to_end()
    rows = [outputs.rows for outputs, _ in simulation.sent]
    assert any(each.num_decode_rows == 1 and each.query_lens[-1] > 1 for each in rows)
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_an_output_whose_sibling_is_ended_while_it_is_computed_goes_on():
    """As by a stop string; with one token a step the other's prompt is never computed."""
    simulation = Simulation(max_num_batched_tokens=4, depth=1, num_blocks=40)
    prompt = [5] * 9
    halves = [expected_tokens(prompt, index, 12, eos=None)[9:] for index in range(2)]
    group = simulation.add(prompt, 12, eos_token_id=None, n=2, resumed=halves)
    while not group.sequences[1].num_computed_tokens:
        simulation.send()
        simulation.answer()
    assert group.sequences[1] in simulation.scheduler.groups.prefilling
    simulation.scheduler.finish(group.sequences[1])
    simulation.run_to_end()
    simulation.check_outputs(besides=[group])
    assert len(simulation.outputs[group][0]) == 12
    simulation.check_nothing_left()


def test_a_trial_lasts_until_each_output_that_runs_is_past_where_it_was():
    """The one that comes first draws while its sibling, which may be the reason, is still computed."""
    simulation = Simulation(max_num_batched_tokens=4, depth=1, num_blocks=60, enable_prefix_caching=False)
    group = simulation.add([5] * 9, 40, eos_token_id=None, n=2)
    while group.sequences[0].num_tokens < 15:
        simulation.send()
        simulation.answer()
    simulation.send()
    before = [sequence.num_tokens for sequence in group.sequences]
    simulation.lose_worker()
    while group.is_on_trial:
        simulation.send()
        assert group in simulation.scheduler.trials.on_trial
        simulation.answer()
    assert all(sequence.num_tokens >= length + 2 for sequence, length in zip(group.sequences, before, strict=True))
    simulation.run_to_end()
    simulation.check_outputs()


def test_a_half_computed_sequence_gives_way_alone():
    simulation = Simulation(max_num_batched_tokens=3, depth=1, num_blocks=40, enable_prefix_caching=False)
    prompt = [5] * 9
    halves = [expected_tokens(prompt, index, 25, eos=None)[9:] for index in range(2)]
    group = simulation.add(prompt, 20, eos_token_id=None, n=2, resumed=halves)
    while not group.sequences[1].num_computed_tokens:
        simulation.send()
        simulation.answer()
    simulation.scheduler._preemption.give_way(group, StepPlan(SchedulingBudget(3, 4)))
    assert [sequence.slot >= 0 for sequence in group.sequences] == [True, False]
    simulation.run_to_end()
    assert not group.num_preemptions
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_a_stop_token_id_ends_a_sequence():
    tokens = expected_tokens([5, 6], 0, 12, eos=None)
    assert tokens[9] not in tokens[:9]
    simulation = Simulation()
    group = simulation.add([5, 6], 20, stop_token_ids=frozenset([96, tokens[9]]), eos_token_id=None)
    simulation.run_to_end()
    assert group.sequences[0].token_ids.tolist() == tokens[:10]
    simulation.check_nothing_left()


def test_a_row_error_ends_its_group_and_touches_no_other():
    simulation = Simulation(row_error=lambda history: "not finite" if history[0] == 1 and len(history) > 7 else None)
    bad, good = simulation.add([1] * 5, 9, eos_token_id=None), simulation.add([2] * 5, 9, eos_token_id=None)
    simulation.run_to_end()
    assert simulation.errors == {bad: "not finite"} and bad.is_finished
    assert len(simulation.outputs[bad][0]) == 3, "three draws went well"
    assert good.sequences[0].token_ids.tolist() == expected_tokens([2] * 5, 0, 14, eos=None)
    simulation.check_outputs()
    simulation.check_nothing_left()


def half_computed_beside_a_decode() -> tuple[Simulation, SequenceGroup, SequenceGroup]:
    """A decode that the policy puts last, and a long prompt that needs all other blocks."""
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=4, depth=1, policy="priority")
    decode = simulation.add([1, 2, 3], 40, eos_token_id=None, priority=5)
    simulation.send()
    simulation.answer()
    prompt = simulation.add([4] * 60, 3, eos_token_id=None)
    return simulation, decode, prompt


def test_the_youngest_half_computed_prompt_is_preempted_before_any_decode():
    simulation, decode, prompt = half_computed_beside_a_decode()
    while not simulation.num_preempted:
        simulation.send()
        simulation.answer()
        simulation.check()
    assert (decode.num_preemptions, prompt.num_preemptions) == (0, 1)
    simulation.run_to_end()


def test_a_step_that_preempted_admits_nobody():
    """A prompt that was preempted earlier would fit at once into the blocks that a larger group gives up."""
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=4, depth=1, policy="priority")
    simulation.add([1, 2, 3], 60, eos_token_id=None)
    large = simulation.add([4] * 24, 36, eos_token_id=None, priority=9)
    while len(simulation.scheduler.groups.running) < 2 or simulation.scheduler.groups.prefilling:
        simulation.send()
        simulation.answer()
    prompt = simulation.add([5] * 24, 3, eos_token_id=None, priority=5)
    while not large.num_preemptions:
        assert prompt not in simulation.scheduler.groups.running or not prompt.num_preemptions
        simulation.send()  # looks at what it admits
        simulation.answer()
    assert prompt.num_preemptions == 1 and prompt not in simulation.scheduler.groups.running
    simulation.send()
    assert prompt in simulation.scheduler.groups.running
    simulation.run_to_end()


def test_admission_leaves_a_watermark_unless_nothing_runs():
    def admitted(*num_prompt_tokens: int) -> int:
        simulation = Simulation(num_blocks=100, max_model_len=500, max_num_batched_tokens=500)
        for number, length in enumerate(num_prompt_tokens):
            simulation.add([number] * length, 1)
        simulation.send()
        return len(simulation.scheduler.groups.running)

    assert admitted(200, 196) == 2
    assert admitted(200, 197) == 1, "it would leave no block free"
    assert admitted(400) == 1, "a group alone may fill the cache"


def test_blocks_of_prompts_that_are_still_being_computed_are_not_given_away(monkeypatch):
    monkeypatch.setattr("scheduler_svc.core.row_filler.MAX_INTRODUCED_BYTES", 600)
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=100)
    first, second, third = (simulation.add([number] * length, 1) for number, length in enumerate((30, 30, 4)))
    simulation.send()
    assert simulation.groups_of(simulation.sent[-1][0].rows) == {first}
    assert simulation.scheduler.groups.running == {first, second}, "the rest of the cache is promised to the second"
    simulation.run_to_end()
    assert third.is_finished and not simulation.num_preempted


def test_a_group_that_needs_the_whole_cache_runs():
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=16)
    group = simulation.add([7] * 63, 5, eos_token_id=None)
    simulation.run_to_end()
    assert group.sequences[0].num_tokens == 64


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_length_stop_never_overshoots(depth):
    simulation = Simulation(depth=depth, num_blocks=64)
    simulation.add([5, 6], 6, eos_token_id=None)
    simulation.run_to_end()
    assert sum(int(outputs.rows.num_answers.sum()) for outputs, _ in simulation.sent) == 6


def test_steady_decode_is_a_few_bytes_a_row():
    simulation = Simulation(
        num_slots=256, max_model_len=256, block_size=16, num_blocks=4096, max_num_batched_tokens=8192
    )
    for number in range(256):
        simulation.add([number % VOCAB_SIZE] * 3, 200, eos_token_id=None)
    steady = []
    for _ in range(30):
        simulation.send()
        (outputs, data), (_, result) = simulation.sent[-1], simulation.in_flight[-1]
        if outputs.rows.num_decode_rows == 256 and not len(outputs.appended_slots) and not outputs.introductions:
            steady.append((len(data) + result.ByteSize()) / 256)
        simulation.answer()
    assert len(steady) > 20
    assert max(steady) < 8, "both ways"


def test_a_steady_decode_step_does_nothing_sequence_by_sequence():
    """Schedule, encode, apply, record, process: as many calls for 8 sequences as for 256, on both sides of the wire."""
    assert _calls_of_a_steady_step(8) == _calls_of_a_steady_step(256)


def _calls_of_a_steady_step(num_slots: int) -> int:
    """Python and C calls made by one whole step: an object or a loop a sequence would show as more of them."""
    simulation = Simulation(
        num_slots=num_slots, max_model_len=256, block_size=256, num_blocks=512, max_num_batched_tokens=8192, depth=1
    )
    for number in range(num_slots):
        simulation.add([number % VOCAB_SIZE], 200, eos_token_id=None)
    for _ in range(3):
        simulation.send()
        simulation.answer()
    token_ids = np.arange(num_slots, dtype=np.int32)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection calls whoever watches it
    sys.setprofile(count)
    try:
        outputs = simulation.scheduler.schedule(simulation.waiting, 0)
        assert outputs is not None
        data = encode(outputs, simulation.step_id + 1).SerializeToString()
        applied = simulation.mirror.apply(worker_pb2.Step.FromString(data))
        simulation.mirror.record_samples(applied.rows, token_ids)
        answer = worker_pb2.SequenceOutputs(token_ids_i32=token_ids.tobytes())
        simulation.scheduler.process_outputs(outputs.rows, decode(answer, outputs.rows.num_answers))
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(outputs.rows) == num_slots
    return calls
