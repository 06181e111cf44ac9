"""A request's sequences by themselves: what is counted of them, and what a message about one can take at most."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.engine.messages.step_encoder import encode
from tests.scheduler.simulation import Simulation

BIG = (1 << 31) - 1  # a token id that takes as many bytes as any


def group(prompt: list[int], **options: Any) -> SequenceGroup:
    params = options.pop("params", inference_pb2.SamplingParams(seed=1))
    return SequenceGroup("one", prompt, params, max_num_tokens=60, arrival_ns=0, **options)


def test_a_message_about_a_sequence_takes_no_more_than_is_reckoned_for_it() -> None:
    """And little more is reckoned than that with the longest numbers, for it limits what one step introduces."""
    params = inference_pb2.SamplingParams(seed=BIG, temperature=0.5, min_tokens=5)
    params.logit_bias.update(dict.fromkeys(range(BIG - 200, BIG, 2), 1.5))
    simulation = Simulation(num_slots=2, num_blocks=40)
    one = simulation.add([1] * 40, 2)
    one.request_id, one.sampling_params = "é" * 400, params
    one.stop_token_ids, one.bad_words = frozenset(range(BIG - 90, BIG)), tuple(array("I", [BIG] * 20) for _ in range(8))
    reckoned = one.sequences[0].introduction_bytes
    outputs = simulation.scheduler.schedule(simulation.waiting, 0)
    assert outputs is not None
    (message,) = encode(outputs, 1, None).groups
    assert message.ByteSize() <= reckoned <= message.ByteSize() + 10 * 40 + 200


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_in_fair_turns_only_who_has_not_had_one_counts_under_its_tenant(begins: bool, is_resumed: bool) -> None:
    one = group([1], tenant="tenant")
    one.first_scheduled_ns, one.is_resumed = 5 if begins else None, is_resumed
    assert POLICIES["fair"].lane(one) == (None if begins or is_resumed else "tenant")


def test_a_slot_holds_what_its_sequence_brought_and_a_fork_what_its_parent_has() -> None:
    columns = SequenceColumns(3, 64, 4)
    one, other = group([1, 2, 3], eos_token_id=9, num_outputs=2).sequences
    one.last_token_ns = 77
    one.attach(columns)
    assert (one.slot, columns.num_free_slots, columns.generation[0]) == (0, 2, 1)
    assert not columns.some_want_logprobs(np.arange(3)) and columns.last_token_ns[0] == 77
    assert (columns.eos_token_id[0], columns.max_num_tokens[0], columns.num_known_tokens[0]) == (9, 60, 3)
    columns.num_computed_tokens[0], columns.num_placeholders[0], columns.num_blocks[0] = 3, 1, 1
    other.attach_as_child(one)
    assert other.slot == 1 and other.token_ids.tolist() == [1, 2, 3] and len(other.block_table) == 0
    assert (other.num_computed_tokens, columns.num_placeholders[1], columns.eos_token_id[1]) == (3, 1, 9)
    columns.num_blocks[1] = 1
    columns.check_integrity()
    other.detach(SequenceStatus.PREEMPTED)
    assert (other.num_pending_tokens, other.last_generation, other.last_token_ns) == (1, 1, 77)
    assert columns.generation[1] == 2 and columns.owner[1] is None and columns.num_free_slots == 2
    assert other.num_computed_tokens == 0 and other.num_tokens == 3
    one.detach(SequenceStatus.FINISHED)
    assert one.num_pending_tokens == 0 and one.slot < 0
    columns.check_integrity()


def test_a_sequence_takes_its_hashes_along_as_far_as_its_tokens_stay() -> None:
    one = group([1] * 6, resumed_token_ids=[[2] * 9]).sequences[0]
    hashes = one.hashes(0, 3, 4)
    assert one.hashes(0, 1, 4) == hashes[:1] and one.hashes(1, 3, 4) == hashes[1:] and one.hashes(2, 3, 4) == hashes[2:]
    one.truncate(14)
    one.append(2)
    assert one.hashes(0, 3, 4) == hashes
    one.truncate(11)
    one.extend([3, 3])
    assert one.num_tokens == 13 and one.hashes(0, 2, 4) == hashes[:2] and one.hashes(2, 3, 4) != hashes[2:]
    child = one.child(5)
    assert (child.index, child.status, child.slot) == (5, one.status, -1) and child.hashes(0, 3, 4) == one.hashes(
        0, 3, 4
    )


def test_hashes_that_decodes_make_one_by_one_are_those_of_the_whole() -> None:
    whole = group([1] * 6, resumed_token_ids=[[2] * 10]).sequences[0].hashes(0, 4, 4)
    for first in range(3):
        one: Sequence = group([1] * 6, resumed_token_ids=[[2] * 10]).sequences[0]
        one.hashes(0, first + 1, 4)
        token_bytes = [one.token_ids[4 * index : 4 * index + 4].tobytes() for index in range(4)]
        assert [one.hash_of_next(index, token_bytes[index], 4) for index in (1, 2, 3)] == whole[1:]
        assert one.hashes(0, 4, 4) == whole
    short = group([1] * 3, resumed_token_ids=[[2] * 5]).sequences[0]
    assert short.hash_of_next(0, short.token_ids[:4].tobytes(), 4) == short.hashes(0, 1, 4)[0], "no block of the prompt"


def test_what_a_group_wants_follows_from_its_sequences() -> None:
    several, one = group([1] * 5, num_outputs=3), group([1] * 5)
    assert (several.begins_as_one, one.begins_as_one, several.num_slots, one.num_slots) == (True, False, 1, 1)
    assert several.num_tokens_to_compute == one.num_tokens_to_compute == 5
    assert several.num_distinct_blocks(4) == 1 + 3 and group([1] * 8, num_outputs=3).num_distinct_blocks(4) == 2
    several.sequences[0].append(7)
    assert (several.begins_as_one, several.num_tokens_to_compute) == (False, 16)
    for sequence in several.sequences[:2]:
        sequence.status = SequenceStatus.SWAPPED
    assert several.num_slots == 2 and len(several.unfinished()) == 3
    several.sequences[2].status = SequenceStatus.FINISHED
    assert several.sequences[:2] == several.unfinished() and not several.is_finished
    assert list(several.free_indices(several.sequences[1:2])) == [0, 2]


def test_logprobs_are_wanted_where_they_are_asked_for_or_choose_the_best() -> None:
    asks = inference_pb2.SamplingParams(seed=1, logprobs=0)
    wants = [group([1], params=asks), group([1], num_outputs=1, best_of=2), group([1], num_outputs=2, best_of=2)]
    assert [each.wants_logprobs for each in wants] == [True, True, False]
    told = inference_pb2.SamplingParams(seed=1, prompt_logprobs=0)
    assert group([1, 2], params=told).awaits_prompt_logprobs and not group([1], params=told).awaits_prompt_logprobs
    assert not group([1, 2], params=told, resumed_token_ids=[[3]]).awaits_prompt_logprobs


def test_who_lost_a_worker_is_on_trial_until_each_sequence_that_runs_has_got_past_it() -> None:
    one = group([1] * 3, num_outputs=2)
    on_trial = [one.is_on_trial]
    one.lost_worker(2)
    assert (one.num_worker_losses, one.num_losses_in_all) == (1, 1)
    columns = SequenceColumns(3, 64, 4)
    one.sequences[0].attach(columns)
    for token_id in (5, 6, 7):
        on_trial.append(one.is_on_trial)
        one.sequences[0].append(token_id)
    assert on_trial == [False, True, True, False], "the other one has no slot, and does not count"
    one.lost_worker(2)
    assert (one.num_worker_losses, one.num_losses_in_all) == (1, 2), "it had passed"
    one.lost_worker(2)
    assert (one.num_worker_losses, one.num_losses_in_all) == (2, 3)
