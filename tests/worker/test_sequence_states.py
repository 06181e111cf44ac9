"""The mirror: what each field of a step does, what it refuses without a trace, and a plain model of it at random."""

from __future__ import annotations

import copy
import gc
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2, worker_pb2
from tests.worker.fake_model import decode, greedy, prefill, slots_u16, u32
from worker_svc.errors import ProtocolError
from worker_svc.mirror.bad_words import BadWords
from worker_svc.mirror.sampling_columns import SamplingColumns
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.steps.input_batch import build_input_arrays

GIVEN, LAST = bytes([worker_pb2.ROW_INPUT_GIVEN_TOKENS]), bytes([worker_pb2.ROW_INPUT_LAST_SAMPLED])
COLUMNS = ("occupied", "num_tokens", "num_computed_tokens", "num_blocks", "sequence_index")


def states_of(max_num_seqs: int = 4, max_model_len: int = 16, num_blocks: int = 16) -> SequenceStates:
    return SequenceStates(max_num_seqs, max_model_len, block_size=4, num_device_blocks=num_blocks, num_host_blocks=4)


def run(states: SequenceStates, step: worker_pb2.Step, tokens: list[int] | None = None) -> Any:
    applied = states.apply(step)
    drawn = np.arange(100, 100 + applied.rows.sample_rows.size) if tokens is None else np.array(tokens)
    states.record_samples(applied.rows, drawn)
    states.check_integrity()
    return applied


def rows_of(**rows: Any) -> worker_pb2.Step:
    return worker_pb2.Step(rows=worker_pb2.Rows(**rows))


def tokens(states: SequenceStates, slot: int) -> list[int]:
    return states.token_ids[slot, : states.num_tokens[slot]].tolist()


def table(states: SequenceStates, slot: int) -> list[int]:
    return states.block_tables[slot, : states.num_blocks[slot]].tolist()


# ---- What a step does -----------------------------------------------------------------------------------------------


def test_prefill_then_decode() -> None:
    states = states_of()
    rows = run(states, prefill(1, [[1, 2, 3], [4]], max_len=8)).rows
    assert rows.context_lens.tolist() == [0, 0] and rows.query_lens.tolist() == [3, 1]
    assert rows.sample_positions.tolist() == [3, 1] and not rows.uses_last_sampled.any()
    rows = run(states, decode(2, [1, 0]), tokens=[9, 8]).rows
    assert rows.context_lens.tolist() == [1, 3] and rows.query_lens.tolist() == [1, 1]
    assert rows.sample_positions.tolist() == [2, 4] and rows.uses_last_sampled.all()
    assert tokens(states, 0) == [1, 2, 3, 100, 8] and tokens(states, 1) == [4, 101, 9]
    assert states.num_computed_tokens[:2].tolist() == [4, 2]


def test_chunks_sample_only_at_the_end_of_the_prompt() -> None:
    states = states_of()
    step = prefill(1, [[1, 2, 3, 4, 5]], max_len=8)
    step.rows.query_lens_u32, step.rows.num_samples_u16 = u32([3]), b"\0\0"
    rows = run(states, step).rows
    assert rows.sample_rows.size == 0 and states.num_computed_tokens[0] == 3 and states.num_tokens[0] == 5
    step = rows_of(slots_u16=b"\0\0", query_lens_u32=u32([2]), num_samples_u16=b"\1\0")
    rows = run(states, step).rows
    assert rows.context_lens.tolist() == [3] and rows.sample_positions.tolist() == [5]
    assert tokens(states, 0) == [1, 2, 3, 4, 5, 100]


def test_tables_are_appended_to_and_replaced() -> None:
    states = states_of()
    run(states, prefill(1, [[1], [2]], max_len=4))
    step = worker_pb2.Step()
    step.block_tables.add().append.CopyFrom(
        worker_pb2.BlockTables(slots_u16=slots_u16([1, 0]), block_ids_u32=u32([7, 8]))
    )
    step.block_tables.add().append.CopyFrom(
        worker_pb2.BlockTables(slots_u16=slots_u16([0, 1]), counts_u16=slots_u16([2, 0]), block_ids_u32=u32([9, 10]))
    )
    run(states, step)
    assert table(states, 0) == [0, 8, 9, 10] and table(states, 1) == [1, 7]
    step = worker_pb2.Step()
    step.block_tables.add().replace.CopyFrom(
        worker_pb2.BlockTables(
            slots_u16=slots_u16([0, 1]), counts_u16=slots_u16([1, 3]), block_ids_u32=u32([5, 4, 3, 2])
        )
    )
    run(states, step)
    assert table(states, 0) == [5] and table(states, 1) == [4, 3, 2]


def test_slot_is_free_again_within_the_step_that_releases_it() -> None:
    states = states_of()
    run(states, prefill(1, [[1, 2, 3]], max_len=8))
    step = prefill(2, [[4]], max_len=8, params=greedy(seed=77))
    step.released_slots_u16 = b"\0\0"
    run(states, step)
    assert tokens(states, 0) == [4, 100] and states.sampling.seed[0] == 77
    run(states, worker_pb2.Step(released_slots_u16=b"\0\0"))
    assert not states.occupied.any() and states.request_ids == [None] * 4


def forks(*entries: list[int]) -> worker_pb2.Step:
    """Forks of (parent slot, child slot, index of the child)."""
    pairs = [slot for entry in entries for slot in entry[:2]]
    return worker_pb2.Step(forks_u16=slots_u16(pairs), fork_indices_u16=slots_u16(entry[2] for entry in entries))


def test_fork_copies_the_parent() -> None:
    states = states_of()
    params = inference_pb2.SamplingParams(seed=5, temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, logprobs=2)
    run(states, prefill(1, [[1, 2, 3]], max_len=8, params=params))
    run(states, forks([0, 2, 7], [2, 3, 8]))  # a child may have children in the same step
    for child in (2, 3):
        assert tokens(states, child) == tokens(states, 0) and table(states, child) == table(states, 0)
        assert states.num_computed_tokens[child] == 3 and states.request_ids[child] == "request-0"
    assert states.sequence_index[[0, 2, 3]].tolist() == [0, 7, 8]
    taken = states.sampling.take(np.array([3]))
    assert [float(column[0]) for column in (taken.temperature, taken.top_p, taken.min_p)] == [0.5, 0.5, 0.25]
    assert taken.top_k[0] == 3 and taken.seed[0] == 5 and taken.num_logprobs[0] == 2 and taken.wants_logprobs[0]


def test_block_operations_are_given_back() -> None:
    step = worker_pb2.Step()
    step.swap_out.pairs_u32, step.swap_in.pairs_u32 = u32([3, 0]), u32([1, 4])
    step.copies.pairs_u32 = u32([5, 6, 5, 7])
    operations = states_of().apply(step).operations
    assert operations.swap_out.tolist() == [[3, 0]] and operations.swap_in.tolist() == [[1, 4]]
    assert operations.copies.tolist() == [[5, 6], [5, 7]]


def test_the_last_block_of_either_side_is_a_block() -> None:
    for step in (
        worker_pb2.Step(swap_out=_pairs(15, 3)),
        worker_pb2.Step(swap_in=_pairs(3, 15)),
        worker_pb2.Step(copies=_pairs(15, 14, 0, 13)),
        worker_pb2.Step(swap_in=_pairs(2, 9), swap_out=_pairs(9, 3)),
    ):
        operations = states_of().apply_blocks(step)
        for name in ("swap_out", "swap_in", "copies"):
            assert u32(getattr(operations, name).ravel()) == getattr(step, name).pairs_u32


def test_given_tokens_enter_the_history() -> None:
    states = states_of()
    run(states, beams(1, [[1, 2]], 4))
    step = rows_of(
        slots_u16=b"\0\0",
        query_lens_u32=u32([1]),
        num_samples_u16=slots_u16([4]),
        inputs_u8=bytes([worker_pb2.ROW_INPUT_GIVEN_TOKENS]),
        given_token_ids_i32=u32([42]),
    )
    run(states, step)
    assert tokens(states, 0) == [1, 2, 42] and states.num_computed_tokens[0] == 3


def beams(step_id: int, prompts: list[list[int]], num_candidates: int, **kind: Any) -> worker_pb2.Step:
    """As `prefill`, of groups that search with beams."""
    params = greedy(use_beam_search=True, best_of=num_candidates // 2)
    step = prefill(step_id, prompts, params=params, **{"max_len": 8, **kind})
    step.rows.num_samples_u16 = slots_u16([num_candidates] * len(prompts))
    return step


def test_candidates_of_beams_leave_the_history_as_it_is() -> None:
    states = states_of()
    step = beams(1, [[1, 2, 3], [4, 5]], 4)
    step.groups[1].sampling_params.use_beam_search = False
    step.rows.num_samples_u16 = slots_u16([4, 1])
    rows = run(states, step, tokens=[50, 51, 52, 53, 60]).rows
    assert rows.is_candidate.tolist() == [True] * 4 + [False]
    assert rows.sample_rows.tolist() == [0, 0, 0, 0, 1] and rows.sample_slots.tolist() == [0, 0, 0, 0, 1]
    assert rows.sample_positions.tolist() == [3, 3, 3, 3, 2]
    assert tokens(states, 0) == [1, 2, 3] and tokens(states, 1) == [4, 5, 60]
    assert states.num_computed_tokens[:2].tolist() == [3, 2]


def test_beam_forks_and_each_goes_on_with_a_token_of_its_own() -> None:
    states = states_of()
    run(states, beams(1, [[1, 2, 3], [7, 8, 9]], 4))
    step = forks([0, 2, 1])
    step.released_slots_u16 = slots_u16([1])  # a beam that nothing continues
    step.copies.pairs_u32 = u32([0, 9])
    step.block_tables.add().replace.CopyFrom(
        worker_pb2.BlockTables(slots_u16=slots_u16([2]), counts_u16=slots_u16([1]), block_ids_u32=u32([9]))
    )
    step.rows.CopyFrom(
        worker_pb2.Rows(
            slots_u16=slots_u16([2, 0]),
            query_lens_u32=u32([1, 1]),
            num_samples_u16=slots_u16([4, 4]),
            inputs_u8=GIVEN * 2,
            given_token_ids_i32=u32([41, 40]),
        )
    )
    before = copy.deepcopy(states)
    applied = states.apply(step)
    assert applied.operations.copies.tolist() == [[0, 9]]
    states.roll_back(applied.rows)
    states.check_integrity()
    for slot in (0, 2):
        assert tokens(states, slot) == tokens(before, 0) and states.num_computed_tokens[slot] == 3
    run(states, rows_of(**{field.name: value for field, value in step.rows.ListFields()}))  # the rows once more
    assert tokens(states, 0) == [1, 2, 3, 40] and tokens(states, 2) == [1, 2, 3, 41]
    assert table(states, 0) == [0, 1] and table(states, 2) == [9]
    assert states.sampling.use_beam_search.tolist()[:3] == [True, True, True] and not states.occupied[1]


def test_child_of_a_new_sequence_has_its_state_and_an_index_of_its_own() -> None:
    states = states_of()
    step = worker_pb2.Step(step_id=1)
    group = step.groups.add(request_id="r", sampling_params=greedy(seed=9))
    group.sequences.add(slot=2, index=0, token_ids=[1, 2, 3, 4, 5], block_table=[6, 7], num_computed_tokens=4)
    group.sequences.add(slot=0, index=1, same_as_slot=2)
    group.sequences.add(slot=3, index=2, same_as_slot=0)
    step.rows.CopyFrom(
        worker_pb2.Rows(
            slots_u16=slots_u16([2]),
            query_lens_u32=u32([1]),
            num_samples_u16=slots_u16([3]),
            child_slots_u16=slots_u16([2, 0, 3]),
        )
    )
    rows = run(states, step, tokens=[50, 51, 52]).rows
    assert rows.sample_indices.tolist() == [0, 1, 2] and rows.sample_positions.tolist() == [5, 5, 5]
    for slot, index, token in ((2, 0, 50), (0, 1, 51), (3, 2, 52)):
        assert tokens(states, slot) == [1, 2, 3, 4, 5, token] and table(states, slot) == [6, 7]
        assert states.num_computed_tokens[slot] == 5 and states.sequence_index[slot] == index
        assert states.sampling.seed[slot] == 9 and states.request_ids[slot] == "r"


def test_adapter_stays_with_slot_and_children_until_released() -> None:
    states = states_of()
    step = prefill(1, [[1, 2, 3]], max_len=8)
    step.groups[0].adapter = "french"
    with pytest.raises(ProtocolError, match="adapter 'french' is not loaded"):
        states.apply(step)
    states.loaded_adapters["french"] = 0
    run(states, step)
    run(states, forks([0, 2, 1]))
    assert states.adapters == ["french", "", "french", ""]
    run(states, worker_pb2.Step(released_slots_u16=slots_u16([0])))
    assert states.adapters == ["", "", "french", ""]


def test_step_whose_cache_operations_fail_has_not_taken_effect() -> None:
    states = states_of()
    run(states, prefill(1, [[1, 2, 3], [4]], max_len=8))
    before = copy.deepcopy(states)
    step = forks([0, 2, 1])
    step.released_slots_u16 = slots_u16([1])
    step.copies.pairs_u32 = u32([0, 9])

    def operate(operations: Any) -> None:
        assert operations.copies.tolist() == [[0, 9]]
        raise MemoryError

    with pytest.raises(MemoryError):
        states.apply_blocks(step, operate)
    for column in COLUMNS:
        assert (getattr(states, column) == getattr(before, column)).all(), column
    assert states.request_ids == before.request_ids
    states.apply_blocks(step)  # the same step again


def test_row_with_children_gives_each_its_own_token_and_index() -> None:
    states = states_of()
    step = prefill(1, [[1, 2, 3], [9]], max_len=4)
    step.groups[1].sequences[0].slot = 3
    step.groups[1].sequences[0].index = 5
    step.rows.query_lens_u32, step.rows.num_samples_u16 = u32([2, 1]), slots_u16([0, 1])
    step.rows.slots_u16 = slots_u16([0, 3])
    run(states, step)
    step = forks([0, 1, 1], [0, 2, 2])
    step.rows.CopyFrom(
        worker_pb2.Rows(
            slots_u16=slots_u16([3, 0]),
            num_decode_rows=1,
            query_lens_u32=u32([1]),
            num_samples_u16=slots_u16([3]),
            child_slots_u16=slots_u16([0, 1, 2]),
        )
    )
    rows = run(states, step, tokens=[50, 60, 61, 62]).rows
    assert rows.sample_rows.tolist() == [0, 1, 1, 1] and rows.sample_slots.tolist() == [3, 0, 1, 2]
    assert rows.sample_indices.tolist() == [5, 0, 1, 2] and rows.sample_positions.tolist() == [2, 3, 3, 3]
    assert [tokens(states, slot) for slot in range(3)] == [[1, 2, 3, 60], [1, 2, 3, 61], [1, 2, 3, 62]]
    assert states.sequence_index.tolist() == [0, 1, 2, 5]
    rows = run(states, decode(3, [0, 1, 2])).rows
    assert rows.sample_indices.tolist() == [0, 1, 2] and rows.context_lens.tolist() == [3, 3, 3]


def test_roll_back_undoes_rows_only() -> None:
    states = states_of()
    run(states, prefill(1, [[1, 2, 3], [4]], max_len=8))
    before = {name: getattr(states, name).copy() for name in COLUMNS}
    step = decode(2, [0])
    step.released_slots_u16 = b"\1\0"
    applied = states.apply(step)
    states.roll_back(applied.rows)
    states.check_integrity()
    assert not states.occupied[1]
    for name in COLUMNS:
        assert getattr(states, name)[0] == before[name][0]


def test_empty_slots_may_be_released_when_resuming() -> None:
    step = worker_pb2.Step(released_slots_u16=slots_u16([0, 1, 2, 3]))
    with pytest.raises(ProtocolError, match="slot 0 is not occupied"):
        states_of().apply(step)
    step.resume_after = 7
    states_of().apply(step)


# ---- What it refuses ------------------------------------------------------------------------------------------------


def _pairs(*blocks: int) -> worker_pb2.BlockPairs:
    return worker_pb2.BlockPairs(pairs_u32=u32(blocks))


def _metadata(**sequence: Any) -> worker_pb2.Step:
    step = worker_pb2.Step()
    group = step.groups.add(request_id="new", sampling_params=greedy())
    group.sequences.add(**{"slot": 3, "token_ids": [1, 2], "block_table": [9], **sequence})
    return step


def _prompt_of(num_tokens: int) -> worker_pb2.Step:
    step = _metadata()
    step.groups[0].num_prompt_tokens = num_tokens
    return step


def _params(**params: Any) -> worker_pb2.Step:
    step = _metadata()
    step.groups[0].sampling_params.MergeFrom(inference_pb2.SamplingParams(**params))
    return step


def _append(**tables: Any) -> worker_pb2.Step:
    return worker_pb2.Step(block_tables=[worker_pb2.BlockTableUpdate(append=worker_pb2.BlockTables(**tables))])


def _row(slot: int = 0, **rows: Any) -> worker_pb2.Step:
    return rows_of(slots_u16=slots_u16([slot]), **{"query_lens_u32": u32([1]), "num_samples_u16": b"\1\0", **rows})


def _copies(*sequences: dict[str, Any]) -> worker_pb2.Step:
    """Slot 2 is new, and so are others that name it or say they do."""
    step = _metadata(slot=2)
    for sequence in sequences:
        step.groups[0].sequences.add(**sequence)
    return step


REFUSED = {
    "released twice": worker_pb2.Step(released_slots_u16=slots_u16([0, 0])),
    "released, not there": worker_pb2.Step(released_slots_u16=slots_u16([3])),
    "released, no such slot": worker_pb2.Step(released_slots_u16=slots_u16([4])),
    "half a slot": worker_pb2.Step(released_slots_u16=b"\0"),
    "fork of nothing": forks([3, 2, 1]),
    "fork into itself": forks([0, 0, 1]),
    "fork into occupied": forks([0, 1, 1]),
    "half a fork": worker_pb2.Step(forks_u16=slots_u16([0])),
    "fork without an index": worker_pb2.Step(forks_u16=slots_u16([0, 2])),
    "metadata for occupied": _metadata(slot=0),
    "metadata, no such slot": _metadata(slot=4),
    "metadata without tokens": _metadata(token_ids=[]),
    "metadata of a longer prompt": _prompt_of(3),
    "metadata too long": _metadata(token_ids=[1] * 17),
    "metadata, no such block": _metadata(block_table=[16]),
    "metadata, too many blocks": _metadata(block_table=range(5)),
    "metadata computed too much": _metadata(num_computed_tokens=3),
    "metadata computed beyond blocks": _metadata(token_ids=[1] * 6, num_computed_tokens=5),
    "copy of a slot that is not in the message": _copies(dict(slot=3, same_as_slot=0)),
    "copy of itself": _copies(dict(slot=3, same_as_slot=3)),
    "copy of a later one": _copies(dict(slot=3, same_as_slot=1), dict(slot=1, token_ids=[1])),
    "copy with tokens of its own": _copies(dict(slot=3, same_as_slot=2, token_ids=[1])),
    "copy with blocks of its own": _copies(dict(slot=3, same_as_slot=2, block_table=[9])),
    "copy into occupied": _copies(dict(slot=0, same_as_slot=2)),
    "copy, no such slot": _copies(dict(slot=4, same_as_slot=2)),
    "token beyond int32": _metadata(token_ids=[1 << 31]),
    "bad words as text": _params(bad_words=["x"]),
    "guided": _params(guided=inference_pb2.GuidedDecoding(regex="a")),
    "copy source is destination": worker_pb2.Step(copies=_pairs(1, 2, 2, 3)),
    "copied to twice": worker_pb2.Step(copies=_pairs(1, 3, 2, 3)),
    "half a copy": worker_pb2.Step(copies=_pairs(1, 2, 3)),
    "copy of no such block": worker_pb2.Step(copies=_pairs(16, 1)),
    "copy into no such block": worker_pb2.Step(copies=_pairs(1, 16)),
    "no such host block": worker_pb2.Step(swap_out=_pairs(1, 4)),
    "swap out of no such block": worker_pb2.Step(swap_out=_pairs(16, 1)),
    "swap in of no such host block": worker_pb2.Step(swap_in=_pairs(4, 1)),
    "swap into no such block": worker_pb2.Step(swap_in=_pairs(1, 16)),
    "half a pair": worker_pb2.Step(copies=_pairs(1)),
    "host block freed and taken": worker_pb2.Step(swap_in=_pairs(2, 9), swap_out=_pairs(1, 2)),
    "append to nothing": _append(slots_u16=slots_u16([2]), block_ids_u32=u32([9])),
    "append without block": _append(slots_u16=slots_u16([0, 1]), block_ids_u32=u32([9])),
    "append no such block": _append(slots_u16=slots_u16([0]), block_ids_u32=u32([16])),
    "append too many": _append(slots_u16=slots_u16([0]), counts_u16=slots_u16([3]), block_ids_u32=u32([9, 10, 11])),
    "row for nothing": decode(1, [2]),
    "row twice": decode(1, [0, 0]),
    "more decode rows than rows": rows_of(slots_u16=slots_u16([0]), num_decode_rows=2),
    "row without length": rows_of(slots_u16=slots_u16([0])),
    "row of nothing": _row(query_lens_u32=u32([0])),
    "row beyond tokens": _row(query_lens_u32=u32([2])),
    "sample inside the prompt": _row(slot=1),
    "decode before the prompt is done": decode(1, [1]),
    "unknown input": _row(inputs_u8=b"\x09"),
    "lookahead": _row(inputs_u8=LAST, query_lens_u32=u32([2]), given_token_ids_i32=u32([1])),
    "a decode row that is described": _row(inputs_u8=LAST),
    "given tokens missing": _row(inputs_u8=GIVEN),
    "given a token that it has drawn": _row(inputs_u8=GIVEN, given_token_ids_i32=u32([1])),
    "tokens nobody takes": _row(given_token_ids_i32=u32([1])),
    "child not there": _row(num_samples_u16=slots_u16([2]), child_slots_u16=slots_u16([0, 2])),
    "child with a row of its own": rows_of(
        slots_u16=slots_u16([0, 1]),
        query_lens_u32=u32([1, 1]),
        num_samples_u16=slots_u16([2, 0]),
        child_slots_u16=slots_u16([0, 1]),
    ),
    "half a given token": _row(inputs_u8=GIVEN, given_token_ids_i32=b"\0\0"),
    "a length too many": _row(query_lens_u32=u32([1, 1])),
    "a number of samples too many": _row(num_samples_u16=slots_u16([1, 1])),
    "an input too many": _row(inputs_u8=b"\0\0"),
    "append with a count too many": _append(
        slots_u16=slots_u16([0]), counts_u16=slots_u16([1, 0]), block_ids_u32=u32([9])
    ),
    "append with a block too many": _append(slots_u16=slots_u16([0]), block_ids_u32=u32([9, 10])),
    "children missing": _row(num_samples_u16=slots_u16([2]), child_slots_u16=slots_u16([0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_and_leave_no_trace(name: str) -> None:
    states = states_of()
    first = prefill(1, [[1, 2, 3], [4, 5, 6, 7]], max_len=8)
    first.rows.query_lens_u32, first.rows.num_samples_u16 = u32([3, 2]), slots_u16([1, 0])
    run(states, first)
    before = copy.deepcopy(states)
    with pytest.raises(ProtocolError) as error:
        states.apply(REFUSED[name])
    assert "\n" not in str(error.value)
    for column in (*COLUMNS, "token_ids", "block_tables"):
        assert (getattr(states, column) == getattr(before, column)).all(), column
    assert states.request_ids == before.request_ids
    states.check_integrity()


def test_model_length_is_a_bound_of_rows_and_samples() -> None:
    states = states_of(max_model_len=6)
    run(states, prefill(1, [[1, 2, 3, 4]], max_len=6))
    run(states, decode(2, [0]))
    with pytest.raises(ProtocolError, match="beyond the model's length"):
        run(states, decode(3, [0]))


def test_table_has_to_cover_the_row() -> None:
    states = states_of()
    run(states, prefill(1, [[1, 2, 3]], max_len=4))
    run(states, decode(2, [0]))
    with pytest.raises(ProtocolError, match="too short"):
        states.apply(decode(3, [0]))


@pytest.mark.parametrize(
    ("column", "place", "value", "complaint"),
    [
        ("occupied", 0, False, "is empty but has state"),
        ("num_computed_tokens", 1, 1, "is empty but has state"),
        ("num_tokens", 0, 0, "impossible number of tokens"),
        ("num_tokens", 0, 17, "impossible number of tokens"),
        ("num_computed_tokens", 0, 5, "computed more than its tokens"),
        ("num_computed_tokens", 0, -1, "computed more than its tokens"),
        ("num_blocks", 0, 0, "computed more than its blocks hold"),
        ("block_tables", (0, 1), 16, "a block out of range"),
        ("block_tables", (0, 0), -1, "a block out of range"),
        ("block_tables", (0, 1), 0, "a block twice"),
        ("request_ids", 0, None, "disagree"),
        ("request_ids", 1, "another", "disagree"),
    ],
)
def test_integrity_check_finds_damage(column: str, place: Any, value: Any, complaint: str) -> None:
    states = states_of()
    run(states, prefill(1, [[1, 2, 3]], max_len=8))
    assert table(states, 0) == [0, 1] and tokens(states, 0) == [1, 2, 3, 100]
    getattr(states, column)[place] = value
    slot = place if isinstance(place, int) else place[0]
    with pytest.raises(AssertionError, match=f"slot {slot} .*{complaint}"):
        states.check_integrity()


# ---- Sampling parameters --------------------------------------------------------------------------------------------


def test_a_slot_that_is_cleared_forbids_no_word() -> None:
    columns = SamplingColumns(3)
    columns.set(1, greedy(), (), BadWords([[1, 2], [3]]))
    columns.copy(1, 2)
    assert columns.has_bad_words.tolist() == columns.compares_words.tolist() == [False, True, True]
    columns.clear(1)
    assert columns.has_bad_words.tolist() == columns.compares_words.tolist() == [False, False, True]
    assert columns.bad_words[1] is None and columns.bad_words[2]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"allowed_token_ids": [3, 100]},
            r"^allowed_token_ids in metadata of 'it' holds 100, out of range \[0, 100\)$",
        ),
        ({"logit_bias": {100: 1.0}}, r"^logit_bias in metadata of 'it' holds 100, out of range"),
        ({"logit_bias": {5: 3e38}}, r"would add 3e\+38 to a logit, more than 100$"),
        ({"presence_penalty": -101.0}, r"would add 101 to a logit"),
        (
            {"use_beam_search": True, "repetition_penalty": 2.0},
            "cannot sample with logits that are adjusted before beams",
        ),
        (
            {"use_beam_search": True, "allowed_token_ids": [3]},
            "cannot sample with logits that are adjusted before beams",
        ),
        ({"guided": {"json_object": True}}, "cannot sample with guided$"),
        ({"temperature": math.nan}, "a number that is not finite"),
    ],
)
def test_parameters_that_no_draw_can_follow_are_refused_before_anything_is_computed(
    params: dict[str, Any], said: str
) -> None:
    step = worker_pb2.Step(step_id=1)
    group = step.groups.add(request_id="it", sampling_params=inference_pb2.SamplingParams(seed=1, **params))
    group.sequences.add(slot=0, token_ids=[1, 2, 3], block_table=[0])
    with pytest.raises(ProtocolError, match=said):
        SequenceStates(4, 64, 16, 16, 0, 100).apply(step)


def test_a_worker_that_is_told_of_no_host_blocks_has_none() -> None:
    with pytest.raises(ProtocolError, match="out of range"):
        SequenceStates(4, 16, 4, 16).apply(worker_pb2.Step(swap_out=_pairs(1, 0)))


def test_parameters_that_are_not_set_have_the_defaults_of_the_public_surface() -> None:
    columns = SamplingColumns(3)

    def filled(**params: Any) -> list[Any]:
        columns.set(1, inference_pb2.SamplingParams(**params))
        return [column[1] for column in (columns.temperature, columns.top_k, columns.top_p, columns.min_p)]

    assert filled() == [1, 0, 1, 0] and columns.repetition_penalty[1] == 1
    assert not columns.takes_largest[1] and not columns.adjusts_logits[1]
    assert filled(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125) == [0.5, 3, 0.25, 0.125]
    assert filled(temperature=0.0, top_k=-1, top_p=0.0) == [0, 0, 0, 0], "zero is not the same as not set"
    assert columns.takes_largest[1]


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"use_beam_search": True}, {"presence_penalty": 1.0}])
def test_only_who_wants_nothing_but_the_largest_is_noted_as_such(more: dict[str, Any]) -> None:
    columns = SamplingColumns(3)
    columns.set(1, inference_pb2.SamplingParams(temperature=0.0, **more))
    assert not columns.takes_largest[1]


# ---- A step costs no object a sequence ------------------------------------------------------------------------------


def _num_calls(num_seqs: int) -> int:
    states = SequenceStates(num_seqs, 16, 4, num_seqs * 4)
    run(states, prefill(1, [[1, 2]] * num_seqs, max_len=16))
    step = decode(2, range(num_seqs))
    append = step.block_tables.add().append
    append.slots_u16, append.block_ids_u32 = slots_u16(range(0)), u32([])
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    gc.disable()  # a collection calls whoever watches it
    sys.setprofile(count)
    try:
        rows = states.apply(step).rows
        batch = build_input_arrays(states, rows, vocab_size=1000).to_device(torch.device("cpu"))
        states.record_samples(rows, np.zeros(num_seqs, np.int64))
    finally:
        sys.setprofile(None)
        gc.enable()
    assert batch.token_ids.shape == (num_seqs,)
    return num_calls


def test_decode_step_makes_as_many_calls_for_many_sequences_as_for_few() -> None:
    _num_calls(2)  # imports and caches
    assert _num_calls(3) == _num_calls(200)


# ---- Against a plain model ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_mirror_equals_a_plain_model(data: st.DataObject) -> None:
    """Lists and dictionaries that do what a step says, one sequence at a time."""
    states = SequenceStates(5, 24, 4, 40)
    plain: dict[int, dict[str, Any]] = {}
    next_token = 0
    for step_id in range(1, data.draw(st.integers(1, 12)) + 1):
        step = worker_pb2.Step(step_id=step_id)
        released = [slot for slot in list(plain) if data.draw(st.integers(0, 5)) == 0]
        step.released_slots_u16 = slots_u16(released)
        for slot in released:
            del plain[slot]
        free = [slot for slot in range(5) if slot not in plain]
        for slot in free[: data.draw(st.integers(0, 2))]:
            tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
            blocks = data.draw(st.permutations(range(40)))[: data.draw(st.integers(0, 3))]
            computed = data.draw(st.integers(0, min(len(tokens) - 1, 4 * len(blocks))))
            plain[slot] = dict(tokens=list(tokens), blocks=list(blocks), computed=computed)
            group = step.groups.add(request_id=str(slot), sampling_params=greedy())
            group.sequences.add(slot=slot, token_ids=tokens, block_table=blocks, num_computed_tokens=computed)

        decodes, others, appended = [], [], []
        for slot in data.draw(st.permutations(sorted(plain))):
            sequence = plain[slot]
            left = len(sequence["tokens"]) - sequence["computed"]
            if len(sequence["tokens"]) >= 24 or data.draw(st.integers(0, 3)) == 0:
                continue
            query_len = data.draw(st.integers(1, left))
            while 4 * len(sequence["blocks"]) < sequence["computed"] + query_len:
                block = next(block for block in range(40) if block not in sequence["blocks"])
                sequence["blocks"].append(block)
                appended.append((slot, block))
            if left == 1 and data.draw(st.booleans()):
                decodes.append((slot, 1, 1))
            else:
                others.append((slot, query_len, int(query_len == left)))
            sequence["computed"] += query_len
        for slot in dict.fromkeys(slot for slot, _ in appended):
            blocks = [block for other, block in appended if other == slot]
            tables = worker_pb2.BlockTables(slots_u16=slots_u16([slot]), counts_u16=slots_u16([len(blocks)]))
            tables.block_ids_u32 = u32(blocks)
            step.block_tables.add().append.CopyFrom(tables)
        step.rows.slots_u16 = slots_u16(slot for slot, _, _ in decodes + others)
        step.rows.num_decode_rows = len(decodes)
        step.rows.query_lens_u32 = u32(query_len for _, query_len, _ in others)
        step.rows.num_samples_u16 = slots_u16(samples for _, _, samples in others)

        applied = states.apply(worker_pb2.Step.FromString(step.SerializeToString()))
        sampling = [slot for slot, _, samples in decodes + others if samples]
        assert applied.rows.sample_slots.tolist() == sampling
        drawn = [next_token + i for i in range(len(sampling))]
        next_token += len(sampling)
        for slot, token in zip(sampling, drawn, strict=True):
            plain[slot]["tokens"].append(token)
        if applied.rows.slots.size:
            _check_batch(states, applied.rows, plain)
        states.record_samples(applied.rows, np.array(drawn, np.int64))
        states.check_integrity()
        assert np.flatnonzero(states.occupied).tolist() == sorted(plain)
        for slot, sequence in plain.items():
            assert tokens_equal(states, slot, sequence)


def tokens_equal(states: SequenceStates, slot: int, sequence: dict[str, Any]) -> bool:
    return (
        tokens(states, slot) == sequence["tokens"]
        and table(states, slot) == sequence["blocks"]
        and states.num_computed_tokens[slot] == sequence["computed"]
    )


def _check_batch(states: SequenceStates, rows: Any, plain: dict[int, dict[str, Any]]) -> None:
    """The input batch, token by token."""
    batch = build_input_arrays(states, rows, vocab_size=1000).to_device(torch.device("cpu"))
    attention = batch.attention
    token = 0
    for row, slot in enumerate(rows.slots.tolist()):
        sequence = plain[slot]
        assert attention.query_starts[row] == token
        assert attention.seq_lens[row] == sequence["computed"]
        for position in range(sequence["computed"] - int(rows.query_lens[row]), sequence["computed"]):
            assert batch.positions[token] == position
            assert batch.token_ids[token] == sequence["tokens"][position]
            block = sequence["blocks"][position // 4]
            assert attention.slot_mapping[token] == block * 4 + position % 4
            assert attention.block_tables[row, position // 4] == block
            token += 1
    assert attention.query_starts[-1] == token == len(batch.token_ids)
    ends = attention.query_starts[1:].numpy() - 1
    assert batch.logits_rows.tolist() == ends[rows.num_samples > 0].tolist()
    assert attention.max_seq_len == int(attention.seq_lens.max())
    assert attention.max_query_len == int(rows.query_lens.max())
