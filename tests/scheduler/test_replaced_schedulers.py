"""Schedulers that are killed amid random histories: workers bring along what they hold, clients what they were told.

The workers' blocks are looked at, not believed: each that is told of has to hold what its hash was given for, and
whoever reads a block finds its own history there or fails (`SimulatedWorker`).
"""

from __future__ import annotations

from unittest import mock

import pytest

from scheduler_svc.routing import worker_queue
from tests.scheduler.pool import Faults, Pool, Size, heard_by
from tests.scheduler.test_pool_histories import History

NUM_SHORT, NUM_LONG = 30, 2_000
SIZE = Size(num_slots=4, num_blocks=32, num_host_blocks=8, max_num_batched_tokens=32, max_model_len=64)
PROMPT = list(range(4, 30))


class ReplacedHistory(History):
    """As its base, but that leases end under workers that live on."""

    def change_workers(self) -> None:
        draw = self.random
        if draw.random() < 0.6:
            self.pool.replace_engine()
        elif (workers := [worker for worker in self.pool.workers if not worker.may_close]) and draw.random() < 0.5:
            self.pool.rejoin(draw.choice(workers))
        else:
            super().change_workers()

    def abort(self) -> None:
        if self.random.random() < 0.5:
            self.change_workers()
        else:
            super().abort()


def check_history(seed: int) -> int:
    """Blocks that were told of."""
    faults = Faults()
    with heard_by(faults), mock.patch.object(worker_queue, "LOOK_AHEAD", 3):
        try:
            history = ReplacedHistory(seed, faults)
            history.run()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
    return history.pool.num_told


@pytest.mark.parametrize("first", range(0, NUM_SHORT, 15))
def test_any_history_goes_on_under_another_scheduler(first: int) -> None:
    assert sum(check_history(seed) for seed in range(first, first + 15)) > 15, "hardly any block was told of"


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(NUM_SHORT, NUM_SHORT + NUM_LONG, 100))
def test_any_history_goes_on_under_another_scheduler_for_long(first: int) -> None:
    for seed in range(first, first + 100):
        check_history(seed)


@pytest.fixture
def pool() -> Pool:
    return Pool(Faults())


def computed(pool: Pool) -> int:
    return sum(worker.worker.num_tokens_computed for worker in pool.workers)


def test_a_new_scheduler_finds_the_prefixes_that_the_one_before_it_computed(pool: Pool) -> None:
    pool.join(SIZE)
    pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    before = computed(pool)
    pool.replace_engine()
    again = pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    assert again.num_cached_tokens == 24, "the full blocks of its prompt"
    assert computed(pool) - before == 40 - 24 - 1, "the rest of the prompt, and draws but the last"
    pool.check_outputs()


def test_what_was_cut_off_is_not_computed_again(pool: Pool) -> None:
    """Its prompt and what was generated of it, but for the block that was not full."""
    pool.join(SIZE)
    group = pool.submit(PROMPT, 60)
    worker = pool.workers[0]
    while len(pool.told[group].tokens.get(0, [])) < 20:
        pool.turn()
        while worker.received:
            worker.run()
            pool.answer(worker)
    before = computed(pool)
    pool.replace_engine()
    pool.run_to_end(SIZE)
    (resumed,) = (other for other in pool.told if other is not group)
    assert resumed.num_cached_tokens >= 24
    assert computed(pool) - before < 60 - 26 - 20 + 8, "the draws that were left, and less than two blocks"
    pool.check_outputs()


def test_a_worker_that_comes_back_to_the_same_scheduler_brings_its_blocks_along(pool: Pool) -> None:
    pool.join(SIZE)
    pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    pool.rejoin(pool.workers[0])
    again = pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    assert again.num_cached_tokens == 24
    pool.check_outputs()


def test_a_flushed_cache_is_not_brought_along(pool: Pool) -> None:
    pool.join(SIZE)
    pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    pool.flush()
    pool.turn()
    (worker,) = pool.workers
    assert worker.received, "an idle worker is told, too"
    worker.run()
    pool.answer(worker)
    pool.turn()
    pool.replace_engine()
    assert pool.num_told == 0


def test_with_prefix_caching_off_nothing_is_told_or_taken() -> None:
    pool = Pool(Faults(), enable_prefix_caching=False)
    pool.join(SIZE)
    pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    pool.replace_engine()
    again = pool.submit(PROMPT, 40)
    pool.run_to_end(SIZE)
    assert pool.num_told == 0 and again.num_cached_tokens == 0


def test_the_blocks_used_last_are_kept_longest(pool: Pool) -> None:
    """A new scheduler that needs room gives up the prefix that nobody has used for the longest time."""
    pool.join(SIZE)
    prompts = [[first, *range(30, 46)] for first in (4, 5, 6)]
    for prompt in [*prompts, prompts[0]]:
        pool.submit(prompt, 20)
        pool.run_to_end(SIZE)
    pool.replace_engine()
    pool.submit(list(range(50, 90)), 64, n=3)  # needs most of the cache
    pool.run_to_end(SIZE)
    found = []
    for prompt in (prompts[0], prompts[1]):
        again = pool.submit(prompt, 20)
        pool.run_to_end(SIZE)
        found.append(again.num_cached_tokens)
    assert found[0] == 16 and found[1] < 16, found
