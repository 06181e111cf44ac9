"""Single histories of a pool that once ended badly; random ones are in `test_pool_histories`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.routing import worker_queue
from tests.scheduler.fake_language import EOS, expected_tokens
from tests.scheduler.pool import Faults, Pool, PoolWorker, Size, heard_by

SMALL = Size(num_slots=4, num_blocks=8, num_host_blocks=0, max_num_batched_tokens=32, max_model_len=64)
LARGE = Size(num_slots=4, num_blocks=40, num_host_blocks=0, max_num_batched_tokens=32, max_model_len=64)


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults()
    with heard_by(found):
        yield found


def prompt_without_end(num_tokens: int, num_outputs: int = 1, max_num_tokens: int = 60) -> list[int]:
    """A prompt none of whose outputs ends before its length."""
    for first in range(90):
        prompt = [first] * num_tokens
        wholes = [expected_tokens(prompt, index, max_num_tokens) for index in range(num_outputs)]
        if all(EOS not in whole[num_tokens:] for whole in wholes):
            return prompt
    raise AssertionError("there is no such prompt")


def step(pool: Pool, worker: PoolWorker, fails: str | None = None) -> None:
    """Runs and answers one step."""
    pool.turn()
    worker.run(fails)
    pool.answer(worker)
    pool.turn()


def resumed_outputs(prompt: list[int], *lengths: int) -> list[list[int]]:
    return [expected_tokens(prompt, i, len(prompt) + length)[len(prompt) :] for i, length in enumerate(lengths)]


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_found_of_a_lone_group_whose_step_failed(faults, fails, depth):
    """Its second output counts as computed what it found of the first, which nobody has computed."""
    pool = Pool(faults, steps_in_flight=depth)
    worker = pool.join(LARGE)
    prompt = prompt_without_end(17, 2)
    lost = pool.submit(prompt, 40, n=2, resumed=resumed_outputs(prompt, 3, 3))
    step(pool, worker, fails)
    end = pool.told[lost].end
    assert end is not None and end[0] is FinishReason.ERROR
    while worker.received:
        worker.run()
        pool.answer(worker)
    retry = pool.submit(prompt, 40)
    pool.run_to_end(LARGE)
    assert retry.num_cached_tokens == 0
    pool.check_outputs()
    pool.check_nothing_left()


@pytest.mark.parametrize("meanwhile", ["abort", "finish_above"])
def test_who_ends_before_the_skipped_steps_are_answered_publishes_nothing(faults, meanwhile):
    pool = Pool(faults, steps_in_flight=2)
    worker = pool.join(Size(4, 40, 0, 12, 64))
    prompt = prompt_without_end(24)
    group, other = pool.submit(prompt, 40), pool.submit(prompt_without_end(5), 40)
    pool.turn()
    worker.run("after")
    worker.run()
    pool.answer(worker)  # the one behind it is still to be answered
    pool.turn()
    if meanwhile == "abort":
        pool.abort(group)
    else:
        pool.finish_above(group.sequences[0])
    pool.turn()
    pool.answer(worker)
    retry = pool.submit(prompt, 40)
    pool.run_to_end(LARGE)
    assert retry.num_cached_tokens == 0 and other not in pool.cut_short
    pool.check_outputs()
    pool.check_nothing_left()


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_groups_that_only_a_lost_worker_could_hold_stand_in_nobodys_way(faults, policy):
    pool = Pool(faults, scheduling_policy=policy)
    large = pool.join(LARGE)
    stuck = [pool.submit([number] * 40, 60) for number in range(worker_queue.LOOK_AHEAD + 1)]
    pool.turn()
    small = pool.join(SMALL)
    pool.lose(large)
    pool.turn()
    fits = pool.submit([7] * 5, 20)
    while not fits.is_finished:
        step(pool, small)
    assert not any(group.is_finished for group in stuck), "the large one may come back"
    if policy == "fcfs":
        pool.join(LARGE)
    pool.run_to_end(LARGE)
    for group in stuck:
        end = pool.told[group].end
        assert (end is None) if policy == "fcfs" else (end is not None and "--worker-wait-timeout" in end[1])
    pool.check_outputs()
    pool.check_nothing_left()


def outgrowing(pool: Pool, **options: Any) -> tuple[SequenceGroup, PoolWorker]:
    """A group that the small worker took, whose known tokens fill the cache by now, with draws in flight."""
    small = pool.join(SMALL)
    prompt = prompt_without_end(9, 2)
    group = pool.submit(prompt, 60, n=2, **options)
    pool.turn()
    while group in pool.engine.workers[0].scheduler.groups.running:
        assert small.received
        worker_steps = len(small.received)
        for _ in range(worker_steps):
            small.run()
        pool.answer(small)
        pool.turn()
    return group, small


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_group_that_outgrows_its_worker_takes_no_draw_in_flight_along(faults, policy):
    pool = Pool(faults, scheduling_policy=policy, steps_in_flight=3)
    group, small = outgrowing(pool)
    assert group.num_pending_tokens, "draws are in flight, and the group stays with them"
    pool.join(LARGE)
    others = [pool.submit([number] * 5, 30, priority=1) for number in range(3)]
    pool.turn()
    pool.lose(small)
    pool.turn()
    assert group.num_pending_tokens == 0
    pool.run_to_end(LARGE)
    assert all(not pool.told[each].end for each in (group, *others))
    pool.check_outputs()
    pool.check_nothing_left()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(1, 0, 0), (0, 1, 0), (2, 0, 1), (0, 0, 0)])
def test_outputs_of_which_some_have_nothing_lose_one_while_the_prompt_is_computed(faults, which, lengths):
    """How a group begins is decided once: that all who are left have only the prompt makes nobody a parent."""
    pool = Pool(faults)
    worker = pool.join(Size(4, 40, 0, 4, 64))
    prompt = prompt_without_end(17, 3)
    group = pool.submit(prompt, 40, n=3, resumed=resumed_outputs(prompt, *lengths))
    step(pool, worker)
    assert not group.sequences[which].num_tokens > 19
    pool.finish_above(group.sequences[which])
    pool.run_to_end(LARGE)
    for index, length in enumerate(lengths):
        assert len(pool.told[group].tokens.get(index, [])) == (length if index == which else 40 - 17)
    pool.check_outputs()
    pool.check_nothing_left()


def test_each_model_has_its_own_workers_and_the_others_are_not_held_up(faults):
    pool = Pool(faults)
    first, second = pool.join(SMALL, "a"), pool.join(SMALL, "b")
    of_nobody = [pool.submit([number] * 5, 20, model="c") for number in range(worker_queue.LOOK_AHEAD + 1)]
    groups = {name: [pool.submit([number] * 6, 20, model=name) for number in range(6)] for name in "ab"}
    while not all(group.is_finished for each in groups.values() for group in each):
        pool.turn()
        for worker in (first, second):
            while worker.received:
                worker.run()
                pool.answer(worker)
    assert not any(group.is_finished for group in of_nobody)
    pool.lose(first)
    again = pool.submit([1] * 5, 20, model="a")
    pool.join(LARGE, "c")
    pool.run_to_end(LARGE)
    assert not any(pool.told[group].end for group in of_nobody)
    end = pool.told[again].end
    assert end is not None and end[0] is FinishReason.ERROR
    assert "none of the workers that are left serves its model" in end[1] and "--worker-wait-timeout" in end[1]
    pool.check_outputs()
    pool.check_nothing_left()
