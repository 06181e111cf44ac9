"""What sequences share through the scheduler: cached prefixes, the prompt of several outputs, beams."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.sequences.block_hashes import extend_hashes, root_hash
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.scheduler.simulated_answers import NOTHING_TO_DRAW
from tests.scheduler.simulation import VOCAB_SIZE, Simulation, expected_tokens

NUM_REQUESTS, NUM_SHARED, NUM_OWN = 64, 512, 32


def simulation_of_common_prefixes(*salts: str, enable_prefix_caching: bool = True) -> Simulation:
    """Simultaneous prompts of NUM_SHARED common and NUM_OWN own tokens, the salts in turn, run to their only token."""
    simulation = Simulation(
        num_slots=NUM_REQUESTS,
        max_model_len=1024,
        block_size=16,
        num_blocks=2500,
        max_num_batched_tokens=2048,
        enable_prefix_caching=enable_prefix_caching,
    )
    shared = [position % VOCAB_SIZE for position in range(NUM_SHARED)]
    for number in range(NUM_REQUESTS):
        simulation.add(shared + [number] * NUM_OWN, 1, cache_salt=salts[number % len(salts)])
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    return simulation


def test_simultaneous_prompts_compute_what_they_share_once():
    simulation = simulation_of_common_prefixes("")
    least = NUM_SHARED + NUM_REQUESTS * NUM_OWN
    assert least <= simulation.num_computed_tokens <= 1.05 * least
    cached = [group.num_cached_tokens for group in simulation.groups]
    assert cached == [0] + [NUM_SHARED] * (NUM_REQUESTS - 1)


def test_without_prefix_caching_everything_is_computed():
    simulation = simulation_of_common_prefixes("", enable_prefix_caching=False)
    assert simulation.num_computed_tokens == NUM_REQUESTS * (NUM_SHARED + NUM_OWN)
    assert all(group.num_cached_tokens == 0 for group in simulation.groups)


def test_salts_separate_what_would_be_shared():
    simulation = simulation_of_common_prefixes("", "salt")
    assert simulation.num_computed_tokens == 2 * NUM_SHARED + NUM_REQUESTS * NUM_OWN


def num_found(simulation: Simulation, prompt: list[int]) -> int:
    """Blocks that a request with that prompt would find."""
    group = simulation.add(prompt, 1)
    found = len(simulation.blocks.find(group.sequences[0]))
    simulation.abort(group)
    return found


def test_what_was_used_longest_ago_is_evicted_first_and_tails_before_what_they_follow():
    simulation = Simulation(num_blocks=16)
    old, recent, large = [1] * 13, [2] * 13, [4] * 45
    for prompt in (recent, old, recent):
        simulation.add(prompt, 1)
        simulation.run_to_end()
    assert (num_found(simulation, old), num_found(simulation, recent)) == (3, 3)
    simulation.add(large, 1)  # 12 blocks of 16, of which 10 are blank
    simulation.run_to_end()
    assert (num_found(simulation, old), num_found(simulation, recent)) == (1, 3)


def test_after_a_flush_nothing_is_found_and_who_runs_goes_on():
    simulation = Simulation(num_blocks=40)
    runs = simulation.add([1] * 13, 20, eos_token_id=None)
    simulation.send()
    simulation.answer()
    assert num_found(simulation, [1] * 13) == 3
    assert simulation.blocks.allocator.flush() == 3
    assert num_found(simulation, [1] * 13) == 0
    simulation.run_to_end()
    assert runs.sequences[0].token_ids.tolist() == expected_tokens([1] * 13, 0, 33, eos=None)
    simulation.check_nothing_left()


def test_what_a_failed_row_has_computed_is_not_found():
    is_bad = True
    simulation = Simulation(row_error=lambda _: "not finite" if is_bad else None)
    bad = simulation.add([1] * 13, 5)
    simulation.run_to_end()
    assert simulation.errors == {bad: "not finite"}
    is_bad = False
    good, after = simulation.add([1] * 13, 5, eos_token_id=None), simulation.add([1] * 13, 5, eos_token_id=None)
    simulation.run_to_end()
    assert (good.num_cached_tokens, after.num_cached_tokens) == (0, 12)
    simulation.check_outputs()
    simulation.check_nothing_left()


POISON, FORBIDDEN = 77, 78
SHARED = [1] * 12


def failing_behind_a_shared_prefix() -> Simulation:
    """A request whose prompt ends in POISON has logits that are not finite, one that ends in FORBIDDEN nothing to draw.
    SHARED is cached: somebody has computed it and ended well."""
    errors = {POISON: "not finite", FORBIDDEN: NOTHING_TO_DRAW}
    simulation = Simulation(row_error=lambda history: errors.get(int(history[-1])))
    simulation.add([*SHARED, 2], 2)
    simulation.run_to_end()
    return simulation


def test_a_request_that_forbids_every_token_costs_nobody_a_block():
    simulation = failing_behind_a_shared_prefix()
    for other in range(3):
        group = simulation.add([*SHARED, *[other] * 8, FORBIDDEN], 5)
        simulation.run_to_end()
        assert simulation.errors[group] == NOTHING_TO_DRAW and group.num_cached_tokens == 12
        assert num_found(simulation, [*SHARED, *[other] * 8, 3]) == 5, "its own blocks are as good as any"
    simulation.check_nothing_left()


@pytest.mark.parametrize("has_success_between", [True, False])
def test_blocks_that_others_computed_are_withdrawn_when_two_have_failed_over_them_in_a_row(has_success_between):
    simulation = failing_behind_a_shared_prefix()
    for number in range(2):
        own = [10 + number] * 8
        simulation.add([*SHARED, *own, POISON], 5)
        simulation.run_to_end()
        assert num_found(simulation, [*SHARED, *own, 3]) == (3 if number == 0 or has_success_between else 0)
        if has_success_between:
            good = simulation.add([*SHARED, 4], 2, eos_token_id=None)
            simulation.run_to_end()
            assert good.num_cached_tokens == 12
    assert len(simulation.errors) == 2
    simulation.check_nothing_left()


@pytest.mark.parametrize("meanwhile", ["runs", "swapped", "ends"])
def test_who_holds_what_a_failed_row_has_computed_does_not_publish_it_again(meanwhile):
    """A worker's fault of one step must not go from request to request for as long as one of them runs."""
    is_bad = True
    simulation = Simulation(
        num_blocks=60,
        num_host_blocks=20,
        preemption_mode="swap",
        row_error=lambda history: "not finite" if is_bad and len(history) == 13 else None,
    )
    bad, holder = simulation.add([1] * 13, 5), simulation.add([1] * 13 + [2] * 40, 5)
    simulation.send()  # the holder finds the first blocks in the step that spoils them
    is_bad = False
    if meanwhile == "swapped":
        simulation.send()
        simulation.scheduler._preemption.preempt(holder)
    simulation.answer()
    assert bad.is_finished and num_found(simulation, [1] * 14) == 0
    simulation.send()
    if meanwhile == "ends":
        simulation.abort(holder)
    assert num_found(simulation, [1] * 14) == 0
    good = simulation.add([1] * 13, 5, eos_token_id=None)
    simulation.run_to_end()
    assert good.num_cached_tokens == 0 and good not in simulation.errors
    assert good.sequences[0].token_ids.tolist() == expected_tokens([1] * 13, 0, 18, eos=None)
    simulation.check_nothing_left()


def test_who_draws_over_what_was_withdrawn_publishes_it_again():
    """It was sound: the request that had computed it failed over a later step of its own."""
    simulation = Simulation(
        num_blocks=60,
        max_num_batched_tokens=len(SHARED),
        depth=1,
        row_error=lambda history: "not finite" if history[-1] == POISON else None,
    )
    bad = simulation.add([*SHARED, POISON], 5)
    simulation.send()
    simulation.answer()
    holder = simulation.add([*SHARED, *[4] * 20], 5, eos_token_id=None)
    simulation.send()
    simulation.answer()
    assert list(simulation.errors) == [bad] and holder.num_cached_tokens == len(SHARED)
    simulation.send()
    assert num_found(simulation, [*SHARED, 5]) == 0, "it has not drawn yet"
    simulation.answer()
    simulation.run_to_end()
    assert num_found(simulation, [*SHARED, *[4] * 20, 5]) == 8
    assert holder not in simulation.errors
    simulation.check_nothing_left()


def test_what_was_computed_on_a_wrong_block_is_withdrawn_with_it():
    cache = PrefixCache(num_blocks=5)
    for name, blocks in (("one", [0, 2, 4]), ("another", [3, 1])):
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(name), bytes(16 * len(blocks)), 16)
        cache.publish(hashes, np.array(blocks, np.int32), np.array([-1, *blocks[:-1]], np.int32))
    assert cache.withdraw(np.array([0])) == [0, 2, 4]
    assert cache.is_cached.tolist() == [False, True, False, True, False]
    cache.check_integrity()


def test_what_has_changed_is_told_from_the_first_look_on_and_all_that_is_there_at_that() -> None:
    cache = PrefixCache(num_blocks=5)
    names = [b"one", b"two", b"three"]
    cache.publish(names[:2], np.array([0, 1], np.int32), np.array([-1, 0], np.int32))
    changes = [cache.take_changes()]
    cache.publish(names[1:], np.array([2, 3], np.int32), np.array([-1, -1], np.int32))
    cache.forget([0])
    changes += [cache.take_changes(), cache.take_changes()]
    assert [(each.published, each.forgotten) for each in changes] == [(names[:2], []), (names[2:], names[:1]), ([], [])]
    assert sorted(cache.hashes()) == sorted(names[1:]) and cache.hashes_of([0, 1, 2]) == [None, b"two", None]


def test_who_found_blocks_of_a_step_that_fails_begins_anew_though_the_cache_was_flushed_meanwhile():
    simulation = Simulation(num_blocks=40, max_num_batched_tokens=40)
    first, _ = (simulation.add([1] * 12 + [number], 5, eos_token_id=None) for number in range(2))
    simulation.send(fails="before")
    simulation.blocks.allocator.flush()
    simulation.abort(first)  # or it would compute them for both
    simulation.answer()
    simulation.run_to_end()
    simulation.check_outputs(besides=[first])
    simulation.check_nothing_left()


def test_sequences_that_a_flush_has_parted_run_one_after_the_other_where_they_fit_only_together():
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=16, depth=1)
    prompt = [1] * 40
    resumed = [expected_tokens(prompt, index, 42, eos=None)[40:] for index in range(2)]
    group = simulation.add(prompt, 8, eos_token_id=None, n=2, resumed=resumed)
    for _ in range(2):
        simulation.send()
        simulation.answer()
    simulation.blocks.allocator.flush()  # one is computed in part, and the other is to share that
    simulation.run_to_end()
    assert group.num_preemptions == 0, "the one that is computed need not be computed again"
    simulation.check_outputs()
    simulation.check_nothing_left()


@pytest.mark.parametrize("meanwhile", ["abort", "preempt"])
def test_what_a_failed_row_has_computed_is_not_found_though_its_blocks_were_given_up(meanwhile):
    """The blocks were published when they were freed, before it was known that the row had failed."""
    is_bad = True
    simulation = Simulation(num_blocks=40, row_error=lambda _: "not finite" if is_bad else None)
    bad = simulation.add([1] * 13, 5)
    simulation.send()
    if meanwhile == "abort":
        simulation.abort(bad)
    else:
        simulation.scheduler._preemption.preempt(bad)
    assert num_found(simulation, [1] * 14) == 3
    is_bad = False
    simulation.answer()
    assert bad.is_finished and num_found(simulation, [1] * 14) == 0
    assert simulation.errors == ({} if meanwhile == "abort" else {bad: "not finite"}), (
        "what has ended does not end twice"
    )
    good = simulation.add([1] * 13, 5, eos_token_id=None)
    simulation.run_to_end()
    assert good.num_cached_tokens == 0 and good not in simulation.errors
    simulation.check_nothing_left()


@pytest.mark.parametrize(("num_prompt_tokens", "num_copies"), [(5, 2), (8, 0)])
def test_several_outputs_compute_the_prompt_once_and_copy_only_a_partial_block(num_prompt_tokens, num_copies):
    simulation = Simulation()
    simulation.add([7] * num_prompt_tokens, 6, eos_token_id=None, n=3)
    simulation.run_to_end()
    simulation.check_outputs()
    assert simulation.num_computed_tokens == num_prompt_tokens + 3 * 5, "the last draws are not computed"
    assert simulation.worker.num_copied == num_copies
    simulation.check_nothing_left()


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_beams_and_outputs_survive_preemption(preemption_mode):
    simulation = Simulation(num_slots=9, num_blocks=16, num_host_blocks=40, preemption_mode=preemption_mode)
    for number in range(3):
        simulation.add([number] * 9, 14, beam_width=3, n=2, eos_token_id=3)
    simulation.add([9] * 9, 14, eos_token_id=None, n=3)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    assert not simulation.errors and simulation.num_preempted
    assert (simulation.worker.num_swapped_in > 0) is (preemption_mode == "swap")


def test_a_group_that_outgrows_the_cache_ends_alone():
    simulation = Simulation(num_blocks=16)
    large = simulation.add([1] * 9, 50, eos_token_id=None, n=3)
    small: SequenceGroup = simulation.add([2] * 5, 30, eos_token_id=None)
    simulation.run_to_end()
    assert simulation.errors == {large: "outgrown"}
    assert small.sequences[0].token_ids.tolist() == expected_tokens([2] * 5, 0, 35, eos=None)
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_outputs_that_are_resumed_end_as_if_nothing_had_happened():
    simulation = Simulation()
    prompt = [5, 6, 7]
    halves = [expected_tokens(prompt, index, 9 + index, eos=None)[3:] for index in range(2)]
    simulation.add(prompt, 20, eos_token_id=None, n=2, resumed=halves)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()
    drawn = sum(int(outputs.rows.num_answers.sum()) for outputs, _ in simulation.sent)
    assert drawn == 2 * 20 - 6 - 7
