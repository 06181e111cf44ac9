"""What a worker remembers of its blocks for the next scheduler: promised, and then neither written nor taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from worker_svc.cache.cached_blocks import CachedBlocks
from worker_svc.errors import ProtocolError
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.mirror.step_columns import BlockOperations

NONE = np.zeros((0, 2), np.int64)
BLOCK_SIZE = 4


def digest(number: int) -> bytes:
    return bytes([number]) * 32


class Fixture:
    """One slot (0) with blocks 1, 2, 3 and 12 tokens, of which 8 are computed."""

    def __init__(self) -> None:
        self.cached = CachedBlocks(8)
        self.states = SequenceStates(2, 32, BLOCK_SIZE, 8)
        self.step(groups=[self.group(0, [1, 2, 3])])

    def group(self, slot: int, table: list[int], computed: int = 8) -> worker_pb2.SequenceGroupMetadata:
        data = worker_pb2.SequenceData(slot=slot, token_ids=range(12), num_computed_tokens=computed, block_table=table)
        return worker_pb2.SequenceGroupMetadata(
            request_id="r", num_prompt_tokens=12, sampling_params=inference_pb2.SamplingParams(seed=1), sequences=[data]
        )

    def step(
        self, *, promises: dict[int, int] | None = None, rows: tuple[int, int] | None = None, **fields: Any
    ) -> int:
        """`promises`: numbers of hashes by block; `rows`: a slot and how many tokens it computes."""
        step = worker_pb2.Step(**fields)
        if promises:
            step.cached_blocks.block_ids_u32 = np.array(list(promises), "<u4").tobytes()
            step.cached_blocks.hashes = b"".join(map(digest, promises.values()))
        if rows:
            step.rows.slots_u16 = np.array([rows[0]], "<u2").tobytes()
            step.rows.query_lens_u32 = np.array([rows[1]], "<u4").tobytes()
            step.rows.num_samples_u16 = np.array([0], "<u2").tobytes()
        cached = self.cached
        cached.forget(step)
        self.states.apply_blocks(step, lambda operations: cached.begin(step, self.states, operations))
        cached.compute(self.states, self.states.apply_rows(step))
        number = cached.promise(step, self.states)
        cached.check_integrity()
        return number

    def told(self) -> dict[int, bytes]:
        told = self.cached.told()
        blocks = np.frombuffer(told.block_ids_u32, "<u4").tolist()
        return {block: told.hashes[32 * at : 32 * at + 32] for at, block in enumerate(blocks)}


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_what_was_promised_is_told_least_recently_used_first(fixture: Fixture) -> None:
    fixture.step(promises={1: 1, 2: 2})
    fixture.step(promises={5: 5})
    assert list(fixture.told().items()) == [(2, digest(2)), (1, digest(1)), (5, digest(5))]
    fixture.step(released_slots_u16=np.array([0], "<u2").tobytes())
    assert list(fixture.told()) == [5, 2, 1], "whoever held them is done with them now"


def test_what_is_written_to_is_forgotten(fixture: Fixture) -> None:
    fixture.step(promises={2: 2, 3: 3, 4: 4, 5: 5})
    fixture.step(rows=(0, 2))  # positions 8 and 9, in block 3
    assert set(fixture.told()) == {2, 4, 5}
    fixture.step(copies=worker_pb2.BlockPairs(pairs_u32=np.array([2, 4], "<u4").tobytes()))
    assert set(fixture.told()) == {2, 5}, "4 was the destination, 2 the source"


def test_what_was_computed_with_an_adapter_is_not_told(fixture: Fixture) -> None:
    fixture.states.loaded_adapters = {"a": 0}
    fixture.step(promises={2: 2})
    group = fixture.group(1, [4, 5, 6], computed=0)
    group.adapter = "a"
    fixture.step(groups=[group], rows=(1, 12), promises={4: 4, 5: 5, 6: 6})
    assert set(fixture.told()) == {2}
    fixture.step(rows=(0, 4), promises={3: 3})
    fixture.step(copies=worker_pb2.BlockPairs(pairs_u32=np.array([6, 7, 3, 4], "<u4").tobytes()), promises={7: 7, 4: 8})
    assert set(fixture.told()) == {2, 3, 4}, "a copy is as its source is"
    operations = BlockOperations(swap_out=NONE, swap_in=np.array([[0, 5]]), copies=NONE)
    fixture.cached.begin(worker_pb2.Step(), fixture.states, operations)
    fixture.step(promises={5: 5})
    assert set(fixture.told()) == {2, 3, 4}, "nobody knows what was swapped out"
    fixture.states.loaded_adapters = {}
    fixture.cached.begin(worker_pb2.Step(), fixture.states, operations)
    fixture.step(promises={5: 5})
    assert set(fixture.told()) == {2, 3, 4, 5}


def test_what_is_swapped_in_replaces_what_was_there(fixture: Fixture) -> None:
    fixture.step(promises={2: 2, 5: 5})
    operations = BlockOperations(swap_out=np.array([[2, 0]]), swap_in=np.array([[0, 5]]), copies=NONE)
    fixture.cached.begin(worker_pb2.Step(), fixture.states, operations)
    assert set(fixture.told()) == {2}


def test_a_block_that_is_filled_and_promised_in_one_step_is_known(fixture: Fixture) -> None:
    fixture.step(promises={3: 9})
    fixture.step(rows=(0, 4), promises={3: 3})
    assert fixture.told() == {3: digest(3)}


def test_a_failed_step_takes_its_promises_and_those_after_it_back(fixture: Fixture) -> None:
    fixture.step(promises={1: 1})
    failed = fixture.step(promises={2: 2})
    fixture.step(promises={5: 5})
    fixture.cached.failed(failed)
    assert set(fixture.told()) == {1}


def test_a_promise_ends_where_a_step_behind_it_writes(fixture: Fixture) -> None:
    """Both are on their way on a GPU: the block is used for something else before its first content is answered for."""
    fixture.step(promises={3: 3})
    second = fixture.step(rows=(0, 1))
    fixture.cached.failed(second)
    assert fixture.told() == {}


def test_the_scheduler_takes_back(fixture: Fixture) -> None:
    fixture.step(promises={1: 1, 2: 2, 5: 5})
    fixture.cached.forget(worker_pb2.Step(forgotten_blocks_u32=np.array([2, 6], "<u4").tobytes()))
    assert set(fixture.told()) == {1, 5}
    fixture.step(forgets_all_blocks=True, promises={2: 7})
    assert fixture.told() == {2: digest(7)}


def test_a_content_is_told_once(fixture: Fixture) -> None:
    """A scheduler that has evicted block 1 may compute the same again into block 5, while 1 still holds it."""
    fixture.step(promises={1: 1})
    fixture.step(promises={5: 1})
    assert fixture.told() == {5: digest(1)}


def test_nothing_of_a_row_over_which_the_model_failed_is_passed_on(fixture: Fixture) -> None:
    fixture.step(promises={2: 2, 5: 5})
    fixture.cached.fail_over(fixture.states, np.array([0]))
    assert set(fixture.told()) == {5}
    fixture.step(promises={3: 3, 6: 6})  # sent before its error was known
    assert set(fixture.told()) == {5, 6}
    fixture.step(released_slots_u16=np.array([0], "<u2").tobytes(), groups=[fixture.group(1, [2, 3, 4])])
    fixture.step(promises={3: 3})
    assert set(fixture.told()) == {5, 6, 3}
    fixture.cached.fail_over(fixture.states, np.array([1]), is_last=False)
    assert fixture.told() == {}


BAD_PROMISES = {
    "range": ([8], bytes(32)),
    "uneven": ([1, 2], bytes(33)),
    "none": ([1], b""),
    "long": ([1], bytes(65)),
    "a block twice": ([1, 1], digest(1) + digest(2)),
    "a content twice": ([1, 2], digest(1) + digest(1)),
}


@pytest.mark.parametrize(("blocks", "hashes"), BAD_PROMISES.values(), ids=BAD_PROMISES)
def test_promises_that_are_none_are_refused(fixture: Fixture, blocks: list[int], hashes: bytes) -> None:
    step = worker_pb2.Step()
    step.cached_blocks.block_ids_u32 = np.array(blocks, "<u4").tobytes()
    step.cached_blocks.hashes = hashes
    with pytest.raises(ProtocolError, match="cached_blocks"):
        fixture.states.apply_blocks(step, lambda each: fixture.cached.begin(step, fixture.states, each))
    with pytest.raises(ProtocolError, match="forgotten_blocks"):
        fixture.cached.forget(worker_pb2.Step(forgotten_blocks_u32=np.array([8], "<u4").tobytes()))


def test_only_hashes_of_one_kind_are_told_together(fixture: Fixture) -> None:
    """A scheduler of another version may name its blocks in another way."""
    fixture.step(promises={1: 1})
    step = worker_pb2.Step()
    step.cached_blocks.block_ids_u32, step.cached_blocks.hashes = np.array([2], "<u4").tobytes(), bytes(16)
    fixture.cached.promise(step, fixture.states)
    told = fixture.cached.told()
    assert np.frombuffer(told.block_ids_u32, "<u4").tolist() == [2] and told.hashes == bytes(16)
