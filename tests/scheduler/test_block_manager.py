"""Which blocks a sequence has, what of them is published under which hash, and what others then find and take."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns

BLOCK, NUM_BLOCKS = 4, 12


def manager(**options: bool) -> BlockSpaceManager:
    return BlockSpaceManager(SequenceColumns(4, 64, BLOCK), NUM_BLOCKS, **options)


def group(prompt: list[int], resumed: Iterable[list[int]] = (), num_outputs: int = 1) -> SequenceGroup:
    params = inference_pb2.SamplingParams(seed=1)
    return SequenceGroup(
        "one",
        prompt,
        params,
        max_num_tokens=60,
        arrival_ns=0,
        num_outputs=num_outputs,
        resumed_token_ids=[*resumed],
    )


def seated(blocks: BlockSpaceManager, sequence: Sequence, num_computed: int | None = None) -> int:
    """Its slot, with so many of its tokens computed (all of them) and none of that published beyond what it found."""
    blocks.make_private(sequence.group)
    sequence.attach(blocks.columns)
    blocks.begin(sequence)
    num_computed = sequence.num_tokens if num_computed is None else num_computed
    blocks.grow(sequence.slot, num_computed)
    blocks.columns.num_computed_tokens[sequence.slot] = num_computed
    return sequence.slot


def num_found(blocks: BlockSpaceManager, token_ids: list[int]) -> int:
    return len(blocks.find(group([*token_ids, 0]).sequences[0]))


def test_a_step_of_decodes_publishes_what_it_has_filled_of_each_slot() -> None:
    """One block is the common case, more have become full where an answer came late; a slot may have none."""
    blocks = manager()
    one, two, none, third = [1] * 4, [2] * 8, [3] * 3, [4] * 12
    slots = [seated(blocks, group(token_ids).sequences[0]) for token_ids in (one, two, none)]
    blocks.publish(np.array(slots))
    assert [num_found(blocks, token_ids) for token_ids in (one, two, none)] == [1, 2, 0]
    assert blocks.columns.num_published[slots].tolist() == [1, 2, 0]
    slot = seated(blocks, group(third).sequences[0], 8)
    blocks.publish_all_of(slot)
    blocks.columns.num_computed_tokens[slot] += len(blocks.grow(slot, 12)) * BLOCK
    before = blocks.take_published()
    blocks.publish(np.array([slot]))
    assert num_found(blocks, third) == 3 and len(before) == 5
    assert blocks.take_published() == [blocks.columns.block_tables[slot, 2]]
    blocks.check_integrity(set())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_wrong_block_takes_along_what_lies_behind_it_and_nothing_else(at_once: bool) -> None:
    """Whichever is wrong, the pool's last block too: those of other prefixes stay, and all in front of it."""
    for wrong in range(NUM_BLOCKS):
        blocks = manager()
        prompts = [[number] * 12 for number in range(4)]
        slots = [seated(blocks, group(prompt).sequences[0], 4) for prompt in prompts]
        for num_computed in [12] if at_once else [4, 8, 12]:
            for slot in slots:
                blocks.grow(slot, num_computed)
                blocks.columns.num_computed_tokens[slot] = num_computed
            blocks.publish(np.array(slots))
        assert [num_found(blocks, prompt) for prompt in prompts] == [3] * 4
        blocks.withdraw([wrong])
        ((row, place),) = np.argwhere(blocks.columns.block_tables[slots, :3] == wrong).tolist()
        assert [num_found(blocks, prompt) for prompt in prompts] == [place if i == row else 3 for i in range(4)]
        assert blocks.columns.num_published[slots].tolist() == [place if i == row else 3 for i in range(4)]
        assert blocks.take_news([]).forgotten, "the worker is told"
        blocks.check_integrity(set())


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_without_prefix_caching_only_a_group_of_several_finds_its_own_blocks(num_sequences: int) -> None:
    blocks = manager(enable_prefix_caching=False)
    mine = group([1] * 8, num_outputs=num_sequences)
    slot = seated(blocks, mine.sequences[0], 4)
    blocks.publish(np.array([slot]))
    blocks.grow(slot, 8)
    blocks.columns.num_computed_tokens[slot] = 8
    blocks.publish_all_of(slot)
    assert len(blocks.cache) == (2 if num_sequences > 1 else 0) and num_found(blocks, [1] * 8) == 0
    assert blocks.columns.num_published[slot] == 2, "not looked at again"
    assert blocks.take_news(blocks.take_published()).blocks == []


@pytest.mark.parametrize(("enable_prefix_caching", "num_hashes"), [(True, 2), (False, 2), (True, 1)])
def test_what_a_worker_still_holds_is_adopted_where_it_can_be_found_again(
    enable_prefix_caching: bool, num_hashes: int
) -> None:
    """And where there is a hash for each block: another kind of scheduler may have left something else."""
    blocks = manager(enable_prefix_caching=enable_prefix_caching)
    hashes = group([1] * 8).prompt_hashes(BLOCK)[:num_hashes]
    ids = np.array([5, 3], "<u4").tobytes()
    blocks.adopt(worker_pb2.CachedBlocks(block_ids_u32=ids, hashes=b"".join(hashes)))
    is_adopted = enable_prefix_caching and num_hashes == 2
    assert len(blocks.cache) == (2 if is_adopted else 0)
    assert blocks.find(group([1] * 9).sequences[0]).tolist() == ([5, 3] if is_adopted else [])


def test_the_worker_is_told_of_published_blocks_and_of_what_it_is_to_forget_once() -> None:
    blocks = manager()
    slot = seated(blocks, group([1] * 8).sequences[0])
    blocks.publish_all_of(slot)
    published = blocks.take_published()
    news = blocks.take_news(published)
    assert news.blocks == published == blocks.columns.block_tables[slot, :2].tolist()
    assert news.hashes == b"".join(group([1] * 8).prompt_hashes(BLOCK)) and not (news.forgotten or news.forgets_all)
    assert blocks.withdraw(published[1:]) == published[1:] and blocks.withdraw([]) == []
    assert blocks.take_news([]).forgotten == published[1:]
    assert blocks.flush() == 1 and blocks.take_news([]).forgets_all
    assert not blocks.take_news([]).forgets_all and not blocks.take_news([]).forgotten


def test_a_group_takes_no_blocks_for_what_others_have_in_use() -> None:
    """Of outputs that have gone different ways each one's own blocks count; what is found but idle has to be taken."""
    blocks = manager()
    prompt, histories = [1] * 8, [[2] * 5, [3] * 6]
    waits = group(prompt, histories, num_outputs=2)
    assert blocks.num_blocks_of(waits) == blocks.num_blocks_to_take(waits) == 6
    held = [group([*prompt, *histories[0], 9]), group([*prompt, *histories[1], 9])]
    for other in held:
        blocks.publish_all_of(seated(blocks, other.sequences[0]))
    assert blocks.num_blocks_to_take(waits) == 6 - 4
    blocks.free(held[0].sequences[0].slot)
    assert blocks.num_blocks_to_take(waits) == 6 - 3, "idle, and so nobody's"
    for sequence, history in zip(waits.sequences, histories, strict=True):
        sequence.extend([7] * 6)
        again = group(prompt, [[*history, *[7] * 6]]).sequences[0]
        assert sequence.hashes(0, 4, BLOCK) == again.hashes(0, 4, BLOCK), "not of a block that was half full"


def test_while_logprobs_of_its_prompt_are_to_come_a_group_finds_nothing() -> None:
    blocks = manager()
    blocks.publish_all_of(seated(blocks, group([1] * 9).sequences[0]))
    for asks in (False, True):
        params = inference_pb2.SamplingParams(seed=1, prompt_logprobs=0 if asks else None)
        waits = SequenceGroup("one", [1] * 9, params, max_num_tokens=20, arrival_ns=0)
        assert len(blocks.find(waits.sequences[0])) == (0 if asks else 2)
        assert blocks.num_blocks_to_take(waits) == (3 if asks else 1)


def test_what_was_found_under_one_root_is_not_what_another_finds() -> None:
    blocks = manager()
    blocks.publish_all_of(seated(blocks, group([1] * 9).sequences[0]))
    waits = group([1] * 9)
    found = blocks.find(waits.sequences[0]).tolist()
    assert len(found) == 2 and blocks.find(waits.sequences[0]).tolist() == found
    root = waits.hash_root
    waits.use_hash_root(b"another")
    assert not len(blocks.find(waits.sequences[0]))
    waits.use_hash_root(root)
    assert blocks.find(waits.sequences[0]).tolist() == found
