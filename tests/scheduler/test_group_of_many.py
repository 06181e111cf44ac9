"""What a request of 128 outputs costs the step loop: hashes and look-ups are counted, not seconds."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from scheduler_svc.core.blocks import prefix_finder
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.blocks.prefix_finder import MAX_HELD, PrefixFinder
from scheduler_svc.core.sequences import sequence as sequence_module
from scheduler_svc.core.sequences.block_hashes import extend_hashes
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.scheduler.simulation import Simulation

N, BLOCK_SIZE, NUM_FULL = 128, 16, 64
PROMPT = [position % 7 for position in range(NUM_FULL * BLOCK_SIZE + 5)]


class Counts:
    """Blocks that were hashed, and hashes that were looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed = self.looked_up = 0
        find = PrefixCache.find

        def count_hashes(hashes: list[bytes], root: bytes, token_bytes: bytes, block_bytes: int) -> None:
            self.hashed += len(token_bytes) // block_bytes
            extend_hashes(hashes, root, token_bytes, block_bytes)

        def count_look_ups(cache: PrefixCache, hashes: list[bytes]) -> list[int]:
            blocks = find(cache, hashes)
            self.looked_up += len(blocks) + (len(blocks) < len(hashes))
            return blocks

        monkeypatch.setattr(sequence_module, "extend_hashes", count_hashes)
        monkeypatch.setattr(PrefixCache, "find", count_look_ups)


def simulation() -> Simulation:
    return Simulation(
        num_slots=N + 1, max_model_len=1200, block_size=BLOCK_SIZE, num_blocks=700, max_num_batched_tokens=512
    )


def test_a_prompt_is_hashed_once_for_all_outputs_and_nothing_more_while_it_waits(monkeypatch: pytest.MonkeyPatch):
    simulated = simulation()
    counts = Counts(monkeypatch)
    runs = simulated.add([9] * 5, 40, eos_token_id=None)
    simulated.send()
    group = simulated.add(PROMPT, 20, eos_token_id=None, n=N)
    # Its slots are free, its blocks are not: as many as are left are kept from it.
    kept = simulated.blocks.allocator.allocate(simulated.blocks.num_free_blocks - 20)
    assert simulated.scheduler.can_ever_run(group)
    for _ in range(10):
        simulated.answer()
        simulated.send()
    assert group in simulated.waiting and runs.sequences[0].num_tokens > 10
    assert counts.hashed <= NUM_FULL + 2  # and what the one that runs has filled
    assert counts.looked_up <= 2 * 20  # one miss each time it is asked about
    simulated.blocks.allocator.free(kept)
    simulated.run_to_end()
    simulated.check_outputs()
    # 20 tokens each: a block is filled behind the prompt's 5, and the tokens of the one that ran filled two.
    assert counts.hashed <= NUM_FULL + 2 * N + 4


def test_a_cached_prompt_is_looked_up_once_while_it_waits(monkeypatch: pytest.MonkeyPatch):
    simulated = simulation()
    simulated.add(PROMPT, 1)
    simulated.run_to_end()
    simulated.add([9] * 5, 40, eos_token_id=None)
    simulated.send()
    group = simulated.add(PROMPT, 2, eos_token_id=None, n=N)
    kept = simulated.blocks.allocator.allocate(simulated.blocks.num_free_blocks - NUM_FULL - 20)
    counts = Counts(monkeypatch)
    for _ in range(10):
        simulated.answer()
        simulated.send()
    assert group in simulated.waiting
    assert NUM_FULL <= counts.looked_up <= NUM_FULL + 20
    simulated.blocks.allocator.free(kept)
    simulated.run_to_end()
    simulated.check_outputs()
    assert group.num_cached_tokens == NUM_FULL * BLOCK_SIZE


def test_outputs_that_have_gone_different_ways_are_hashed_once_while_they_wait(monkeypatch: pytest.MonkeyPatch):
    """As after a lost worker: each output has a history of its own, and the blocks of all are counted."""
    simulated = simulation()
    counts = Counts(monkeypatch)
    histories = [[output % 5] * 40 for output in range(N)]  # of five kinds; 45 tokens behind the prompt's full blocks
    group = simulated.add(PROMPT, 60, eos_token_id=None, n=N, resumed=histories)
    expected = NUM_FULL + 5 * 2 + N
    for _ in range(10):
        assert simulated.blocks.num_blocks_of(group) == expected
        assert simulated.blocks.num_blocks_to_take(group) == expected
    assert counts.hashed == NUM_FULL + 2 * N
    simulated.scheduler.groups.finish(group.sequences[0])
    assert simulated.blocks.num_blocks_of(group) == expected - 1


@pytest.mark.parametrize("num_prompt_tokens", [8, 10])
@pytest.mark.parametrize(
    "histories",
    [[[5], [], []], [[], [5] * 9, []], [[5] * 4, [], [5] * 4], [[5] * 4, [5] * 4, [5] * 5], [[5], [6], [7]]],
    ids=str,
)
def test_outputs_that_begin_apart_take_as_many_blocks_as_they_were_counted_for(
    num_prompt_tokens: int, histories: list[list[int]]
):
    """Also one at the end of a block: it computes its last token, and shares that block with nobody."""
    simulated = Simulation(num_slots=8, max_model_len=64, block_size=4, num_blocks=64, max_num_batched_tokens=64)
    group = simulated.add([1] * num_prompt_tokens, 20, eos_token_id=None, n=3, resumed=histories)
    counted, most_held = simulated.blocks.num_blocks_of(group), 0
    lengths = [sequence.num_tokens for sequence in group.sequences]
    while all(sequence.num_tokens == length for sequence, length in zip(group.sequences, lengths, strict=True)):
        simulated.send()
        most_held = max(most_held, simulated.blocks.allocator.num_blocks - simulated.blocks.num_free_blocks)
        simulated.answer()
    assert most_held == counted
    simulated.run_to_end()
    simulated.check_nothing_left()


# ---- what was found before ------------------------------------------------------------------------------------------

NUM_BLOCKS = 12


def naive(cache: PrefixCache, group: SequenceGroup, index: int) -> list[int]:
    """Every hash of the sequence, made and looked up anew."""
    sequence = group.sequences[index]
    hashes: list[bytes] = []
    whole = (sequence.num_tokens - 1) // 2 * 2
    extend_hashes(hashes, group.hash_root, np.asarray(sequence.token_ids[:whole], np.int32).tobytes(), 8)
    return cache.find(hashes)


@settings(max_examples=150)
@given(data=st.data())
def test_what_is_found_again_is_what_a_new_search_finds(data: Any):
    cache = PrefixCache(NUM_BLOCKS)
    finder = PrefixFinder(cache, 2)
    finder._num_held = data.draw(st.sampled_from([0, MAX_HELD - 50]))  # about to become too much
    token_ids = st.lists(st.integers(0, 1), max_size=6)
    groups = [
        SequenceGroup(
            f"g{number}",
            [0, 0, *data.draw(token_ids)],
            pb.SamplingParams(),
            max_num_tokens=40,
            arrival_ns=0,
            num_outputs=2,
            resumed_token_ids=data.draw(st.sampled_from([(), (data.draw(token_ids), data.draw(token_ids))])),
        )
        for number in range(3)
    ]
    for _ in range(data.draw(st.integers(1, 25))):
        group = data.draw(st.sampled_from(groups))
        sequence = data.draw(st.sampled_from(group.sequences))
        cached = np.flatnonzero(cache.is_cached).tolist()
        blank = np.flatnonzero(~cache.is_cached).tolist()
        match data.draw(st.sampled_from(["publish", "forget", "append", "new root", "flush"])):
            case "publish" if blank and sequence.num_tokens >= 2:
                index = data.draw(st.integers(0, sequence.num_tokens // 2 - 1))
                block = data.draw(st.sampled_from(blank))
                cache.publish(sequence.hashes(index, index + 1, 2), np.array([block], np.int32), np.array([-1]))
            case "forget" if cached:
                cache.forget([data.draw(st.sampled_from(cached))])
            case "append" if sequence.num_tokens < 39:
                sequence.append(data.draw(st.integers(0, 1)))
            case "new root":
                group.use_hash_root(data.draw(st.sampled_from([b"a", b"b"])))
            case "flush":
                cache.forget(cached)
        for each in groups:
            found = [finder.find(sequence).tolist() for sequence in each.sequences]
            assert found == [naive(cache, each, index) for index in range(2)]
            assert sorted(finder.find_distinct(each).tolist()) == sorted(
                {block for blocks in found for block in blocks}
            )


def simulation_of_many(n: int, num_slots: int, **options: Any) -> tuple[Simulation, SequenceGroup, SequenceGroup]:
    """One long request that runs, and one of `n` short outputs that comes after it."""
    simulation = Simulation(
        num_slots=num_slots, max_model_len=256, block_size=4, num_blocks=2_000, max_num_batched_tokens=64, **options
    )
    long = simulation.add([1] * 6, 240, eos_token_id=None)
    simulation.send()
    return simulation, long, simulation.add([2] * 10, 20, eos_token_id=None, n=n)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_outputs_start_as_slots_come_free(enable_prefix_caching):
    """All slots at once would be those that the long one leaves: it would have to end first."""
    simulation, long, many = simulation_of_many(64, 16, enable_prefix_caching=enable_prefix_caching)
    behind = simulation.add([3] * 5, 20, eos_token_id=None)
    steps = 0
    while not (many.is_finished and behind.is_finished):
        while len(simulation.in_flight) < simulation.depth and simulation.send():
            steps += 1
        simulation.answer()
        simulation.check()
    assert not long.is_finished and steps < 150, "65 outputs of 20 tokens, 15 at a time, take about 90 steps"
    rows = [len(outputs.rows) for outputs, _ in simulation.sent[3:80]]
    assert sum(rows) > 0.8 * 16 * len(rows), "slots stay idle though outputs wait for one"
    computed = sum(int(outputs.rows.query_lens.sum()) for outputs, _ in simulation.sent)
    assert computed < 64 * 25 + 300, "the prompt's full blocks are computed once for all"
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_beams_wait_for_all_their_slots_and_outputs_that_wait_take_none_of_them():
    simulation, _, many = simulation_of_many(6, 8)
    beams = simulation.add([4] * 7, 12, beam_width=4, n=2)
    simulation.run_to_end()
    assert many.is_finished and beams.is_finished
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_prompt_logprobs_are_told_once_though_outputs_come_late():
    simulation = Simulation(num_slots=3, num_blocks=60, max_num_batched_tokens=8, depth=3)
    simulation.add([2] * 10, 12, eos_token_id=None, n=8, asks_prompt_logprobs=True)
    simulation.run_to_end()
    simulation.check_outputs()
    simulation.check_nothing_left()


def test_more_outputs_than_the_worker_has_slots_take_turns():
    simulation = Simulation(num_slots=2, num_blocks=60, max_num_batched_tokens=8)
    group = simulation.add([2] * 10, 6, eos_token_id=None, n=9)
    simulation.run_to_end()
    simulation.check_outputs()
    assert group.num_preemptions == 0
    simulation.check_nothing_left()


def test_what_was_found_is_forgotten_where_it_becomes_much(monkeypatch: pytest.MonkeyPatch):
    """Requests that run, or wait for another worker, are looked at by every worker, and live for long."""
    monkeypatch.setattr(prefix_finder, "MAX_HELD", 1600)
    cache = PrefixCache(NUM_BLOCKS)
    finder = PrefixFinder(cache, 2)
    groups = [SequenceGroup("g", [1] * 9, pb.SamplingParams(), max_num_tokens=9, arrival_ns=0) for _ in range(250)]
    cache.publish([b"another's"], np.array([0], np.int32), np.array([-1]))
    for group in groups:
        assert not len(finder.find(group.sequences[0]))
    assert len(finder._found) <= 1600 // 16 < len(groups)
    live = len(finder._found)
    del groups[-live:], group
    gc.collect()
    assert not len(finder._found), "it keeps alive who has ended"


def test_outputs_leave_beams_the_slots_that_they_were_promised() -> None:
    """Of six slots one beam runs, and three are sure for those that come of it; one output runs, and one more can."""
    simulated = Simulation(num_slots=6, num_blocks=60, max_num_batched_tokens=64, depth=1)
    beams = simulated.add([1] * 5, 12, eos_token_id=None, beam_width=4)
    several = simulated.add([2] * 5, 12, eos_token_id=None, n=3)
    late = simulated.add([3] * 5, 12, eos_token_id=None)
    groups = simulated.scheduler.groups
    assert simulated.send() and late in simulated.waiting
    assert (groups.num_seated(beams), groups.num_seated(several)) == (1, 2)
    assert groups.num_slots_left == 0 < simulated.columns.num_free_slots == 3
    simulated.run_to_end()
    assert groups.num_slots_left == simulated.columns.num_free_slots == 6
    simulated.check_outputs()


def test_who_is_new_stands_back_behind_those_who_wait_for_slots_but_those_it_overrules() -> None:
    simulated = Simulation(num_slots=4, num_blocks=60, max_num_batched_tokens=64, depth=1, policy="priority")
    simulated.add([1] * 5, 12, eos_token_id=None, n=3, priority=1)
    groups = simulated.scheduler.groups
    assert groups.num_free_slots == 4
    assert groups.num_free_slots_for(simulated.add([3] * 5, 2, eos_token_id=None, priority=1)) == 4
    for group in simulated.groups[1:]:
        simulated.abort(group)
    groups.seat(simulated.waiting.pop(), 1)
    assert (groups.num_free_slots, groups.num_slots_left) == (1, 3)
    free = [groups.num_free_slots_for(simulated.add([3] * 5, 2, priority=priority)) for priority in (0, 1, 2)]
    assert free == [3, 1, 1]


@pytest.mark.parametrize("parent_slot", [0, 1])
def test_children_of_a_step_that_failed_give_their_slots_up_whichever_they_are(parent_slot: int) -> None:
    simulated = Simulation(num_slots=3, num_blocks=60, depth=1)
    taken = [simulated.add([9 + number], 1, eos_token_id=None) for number in range(parent_slot)]
    for group in taken:
        simulated.waiting.remove(group)
        simulated.scheduler.groups.seat(group, 1)
    several = simulated.add([1] * 5, 6, eos_token_id=None, n=3)
    simulated.waiting.remove(several)
    groups = simulated.scheduler.groups
    groups.seat(several, 1)
    parent = several.sequences[0]
    for group in taken:
        simulated.scheduler.abort(group)  # a slot before the parent's is free
    children = groups.fork_children(parent)
    assert {child.slot for child in children} == {0, 1, 2} - {parent_slot}
    groups.forked_in_vain(parent, children)
    assert all(child.slot < 0 for child in children) and groups.unforked == groups.expanding == {several}
    assert simulated.columns.num_free_slots == 2 and not groups.forks
    simulated.scheduler.check_integrity()
