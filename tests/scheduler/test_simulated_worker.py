"""The simulated worker: that it says what its language says, and that a cache handled wrongly does not get past it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from tests.scheduler.fake_language import (
    content_of,
    expected_tokens,
    logprobs_after,
    next_token,
    start_of,
)
from tests.scheduler.simulated_worker import SimulatedWorker
from worker_svc.errors import ProtocolError

SAMPLES = inference_pb2.SamplingParams(seed=1)
BEAMS = inference_pb2.SamplingParams(seed=1, temperature=0, best_of=2, use_beam_search=True)
GIVEN = worker_pb2.ROW_INPUT_GIVEN_TOKENS
KNOWN = worker_pb2.ROW_INPUT_KNOWN_TOKENS


def u16(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<u2").tobytes()


def u32(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<u4").tobytes()


class Script:
    """Steps written by hand for a worker with blocks of four tokens, one after the other."""

    def __init__(self, **options: Any) -> None:
        self.worker = SimulatedWorker(6, 32, 4, 16, 4, **options)
        self.step_id = 0
        self.step = worker_pb2.Step()

    def add(self, slot: int, tokens: Sequence[int], table: Sequence[int], computed: int = 0, **group: Any) -> None:
        message = self.step.groups.add(request_id=f"r{slot}", sampling_params=group.pop("params", SAMPLES), **group)
        message.sequences.add(slot=slot, token_ids=tokens, block_table=table, num_computed_tokens=computed)

    def fork(self, parent: int, child: int, index: int) -> None:
        self.step.forks_u16 += u16([parent, child])
        self.step.fork_indices_u16 += u16([index])

    def table(self, slot: int, blocks: Sequence[int], *, replaces: bool = False) -> None:
        update = self.step.block_tables.add()
        tables = update.replace if replaces else update.append
        tables.slots_u16, tables.counts_u16, tables.block_ids_u32 = u16([slot]), u16([len(blocks)]), u32(blocks)

    def decode(self, *slots: int) -> None:
        assert not self.step.rows.query_lens_u32, "decode rows come first"
        self.step.rows.slots_u16 += u16(slots)
        self.step.rows.num_decode_rows += len(slots)

    def row(self, slot: int, query_len: int, num_samples: int = 1, given: int | None = None, to: Any = ()) -> None:
        rows = self.step.rows
        rows.slots_u16 += u16([slot])
        rows.query_lens_u32 += u32([query_len])
        rows.num_samples_u16 += u16([num_samples])
        rows.inputs_u8 += bytes([KNOWN if given is None else GIVEN])
        rows.given_token_ids_i32 += b"" if given is None else u32([given])
        rows.child_slots_u16 += u16(to)

    def run(self, fails: str | None = None) -> worker_pb2.StepResult:
        self.step_id += 1
        self.step.step_id = self.step_id
        step, self.step = worker_pb2.Step.FromString(self.step.SerializeToString()), worker_pb2.Step()
        result = self.worker.run(step, fails)
        self.worker.states.check_integrity()
        return result

    def tokens(self) -> list[int]:
        return tokens_of(self.run())

    def history(self, slot: int) -> list[int]:
        states = self.worker.states
        return states.token_ids[slot, : states.num_tokens[slot]].tolist()


def tokens_of(result: worker_pb2.StepResult) -> list[int]:
    return np.frombuffer(result.outputs.token_ids_i32, "<i4").tolist()


PROMPT = [5, 6, 7, 8, 9, 10]


def started(**options: Any) -> Script:
    """Slot 0 has computed PROMPT in blocks 0 and 1 and drawn one token."""
    script = Script(**options)
    script.add(0, PROMPT, [0, 1])
    script.row(0, len(PROMPT))
    script.run()
    return script


# ---- What it says ---------------------------------------------------------------------------------------------------


def test_prefill_and_decode_say_what_is_expected() -> None:
    script = started()
    for _ in range(2):
        script.decode(0)
        script.run()
    assert script.history(0) == expected_tokens(PROMPT, 0, 9, eos=None)
    assert script.worker.num_tokens_computed == 8 and script.worker.num_steps == 3


def test_expected_tokens_end_with_the_end_token() -> None:
    endless = expected_tokens(PROMPT, 1, 40, eos=None)
    eos = endless[20]
    ended = expected_tokens(PROMPT, 1, 40, eos)
    assert ended == endless[: endless.index(eos, len(PROMPT)) + 1]
    assert len(set(endless[len(PROMPT) :])) > 20, "a language that goes round in circles would hide lost tokens"


def test_chunks_write_what_one_prefill_writes() -> None:
    script = Script()
    script.add(0, PROMPT, [3, 9])
    script.row(0, 3, 0)
    assert script.tokens() == []
    script.row(0, 3)
    assert script.tokens() == [next_token(content_of(PROMPT))]


def test_a_block_computed_in_the_same_step_is_a_cache_hit() -> None:
    script = Script()
    script.add(1, [*PROMPT[:4], 20, 21], [0, 2], computed=4)
    script.add(0, PROMPT, [0, 1])
    script.row(1, 2)  # before the row whose block it reads
    script.row(0, 6)
    assert script.tokens() == [next_token(content_of([*PROMPT[:4], 20, 21])), next_token(content_of(PROMPT))]


def test_children_of_one_row_differ_by_index() -> None:
    script = Script()
    message = script.step.groups.add(request_id="r", sampling_params=SAMPLES)
    message.sequences.add(slot=2, token_ids=PROMPT, block_table=[0, 1])
    for index, slot in enumerate([4, 1], start=1):
        message.sequences.add(slot=slot, index=index, same_as_slot=2)
    script.row(2, 6, 3, to=[2, 4, 1])
    assert script.tokens() == [next_token(content_of(PROMPT), index) for index in range(3)]
    script.step.copies.pairs_u32 = u32([1, 5, 1, 6])
    script.table(4, [0, 5], replaces=True)
    script.table(1, [0, 6], replaces=True)
    script.decode(1, 2, 4)
    script.run()
    for index, slot in enumerate([2, 4, 1]):
        assert script.history(slot) == expected_tokens(PROMPT, index, 8, eos=None)


def test_beams_answer_candidates_and_go_on_with_given_tokens() -> None:
    script = Script()
    script.add(0, PROMPT, [0, 1], params=BEAMS)
    script.row(0, 6, 4)
    result = script.run()
    exact = logprobs_after(content_of(PROMPT))
    best = sorted(range(97), key=lambda token: (-exact[token], token))[:4]
    assert tokens_of(result) == best and script.history(0) == PROMPT
    assert np.frombuffer(result.outputs.logprobs_f32, "<f4").tolist() == exact[best].tolist()
    assert abs(np.exp(exact.astype(np.float64)).sum() - 1) < 1e-5
    script.fork(0, 3, 1)
    script.step.copies.pairs_u32 = u32([1, 7])
    script.table(3, [0, 7], replaces=True)
    script.row(0, 1, 2, given=best[1])
    script.row(3, 1, 2, given=best[0])
    found = script.tokens()
    for slot, token in ((0, best[1]), (3, best[0])):
        logprobs = logprobs_after(content_of([*PROMPT, token]))
        assert found[:2] == np.argsort(-logprobs)[:2].tolist() and script.history(slot) == [*PROMPT, token]
        found = found[2:]


def test_logprobs_are_of_those_who_ask() -> None:
    script = Script()
    script.add(0, [1], [0])
    script.add(1, [2], [1], params=inference_pb2.SamplingParams(seed=1, logprobs=2))
    script.row(0, 1)
    script.row(1, 1)
    outputs = script.run().outputs
    logprobs = logprobs_after(content_of([2]))
    token = next_token(content_of([2]))
    assert np.frombuffer(outputs.logprobs_f32, "<f4").tolist() == [0, logprobs[token]]
    assert np.frombuffer(outputs.ranks_u32, "<u4").tolist() == [0, 1 + (logprobs > logprobs[token]).sum()]
    assert np.frombuffer(outputs.top_counts_u32, "<u4").tolist() == [0, 2]
    assert np.frombuffer(outputs.top_token_ids_i32, "<i4").tolist() == np.argsort(-logprobs)[:2].tolist()


def test_adapters_are_other_languages_and_have_to_be_loaded() -> None:
    script = started(max_loras=1)
    script.worker.load_adapter("french", generation=2)
    script.worker.load_adapter("latin")
    script.add(1, PROMPT, [2, 3], adapter="french")
    script.row(1, 6)
    assert script.tokens() == [next_token(content_of(PROMPT, start_of("french", 2)))] != [script.history(0)[-1]]
    script.add(2, PROMPT, [0, 4], computed=4, adapter="french")  # blocks that were computed without it
    script.row(2, 2)
    with pytest.raises(AssertionError, match=r"position 0 of slot 2 .* block 0, which holds position 0 of slot 0"):
        script.run()
    script = started(max_loras=1)
    script.worker.load_adapter("french")
    script.worker.load_adapter("latin")
    script.add(1, PROMPT, [2, 3], adapter="french")
    script.add(2, PROMPT, [4, 5], adapter="latin")
    script.row(1, 6)
    script.row(2, 6)
    with pytest.raises(AssertionError, match="at most 1 adapters"):
        script.run()
    with pytest.raises(AssertionError, match="while a slot uses it"):
        script.worker.unload_adapter("latin")
    script.add(3, PROMPT, [6, 7], adapter="greek")
    with pytest.raises(ProtocolError, match="'greek' is not loaded"):
        script.run()


# ---- Cache operations, right and wrong ------------------------------------------------------------------------------


def test_swapping_out_and_in_keeps_a_history() -> None:
    script = started()
    script.step.released_slots_u16 = u16([0])
    script.step.swap_out.pairs_u32 = u32([0, 2, 1, 1])
    script.add(1, [30, 31, 32, 33], [0, 1])  # takes both blocks in the same step
    script.row(1, 4)
    script.run()
    history = expected_tokens(PROMPT, 0, 7, eos=None)
    script.step.swap_in.pairs_u32 = u32([2, 8, 1, 9])
    script.add(0, history, [8, 9], computed=6)
    script.row(0, 1)
    assert script.tokens() == [next_token(content_of(history))]
    assert script.worker.num_swapped_out == script.worker.num_swapped_in == 2


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ([2, 8], "position 4 of slot 0 .r0. is read from block 9, which was never written"),
        ([1, 8, 2, 9], "position 0 of slot 0 .r0. is read from block 8, which holds position 4 of slot 0"),
        ([2, 8, 3, 9], "position 4 of slot 0 .r0. is read from block 9, which was never written"),
    ],
)
def test_missing_and_mistaken_swap_is_found(pairs: list[int], complaint: str) -> None:
    script = started()
    script.step.released_slots_u16 = u16([0])
    script.step.swap_out.pairs_u32 = u32([0, 2, 1, 1])
    script.run()
    script.step.swap_in.pairs_u32 = u32(pairs)
    script.add(0, expected_tokens(PROMPT, 0, 7, eos=None), [8, 9], computed=6)
    script.row(0, 1)
    with pytest.raises(AssertionError, match=complaint):
        script.run()


def test_swap_in_comes_before_copies_and_after_swap_out() -> None:
    script = started()
    script.step.swap_out.pairs_u32 = u32([1, 0])
    script.run()
    script.step.released_slots_u16 = u16([0])
    script.step.swap_out.pairs_u32 = u32([0, 1])
    script.step.swap_in.pairs_u32 = u32([0, 0])  # the second block's content into the first, which has just left
    script.step.copies.pairs_u32 = u32([0, 5])
    script.run()
    worker = script.worker
    assert worker.host[1].tolist() == [content_of(PROMPT[: end + 1]) for end in range(4)]
    assert worker.device[5, :2].tolist() == worker.device[0, :2].tolist() == worker.host[0, :2].tolist()
    assert worker.device[5, 1] == content_of(PROMPT)


def test_wrong_table_is_found() -> None:
    script = started()
    script.table(0, [0, 2], replaces=True)
    script.decode(0)
    with pytest.raises(AssertionError, match=r"step 2: position 4 of slot 0 .* block 2, .* never written"):
        script.run()


def test_missing_copy_is_found_as_soon_as_the_two_differ() -> None:
    script = started()
    script.decode(0)
    script.run()
    script.fork(0, 1, 1)
    script.table(0, [2])
    script.table(1, [2])
    script.decode(0, 1)  # the same token at the same place: both still agree
    script.run()
    script.decode(0, 1)
    with pytest.raises(AssertionError, match=r"is read from block 2, which holds position 8 of slot [01]"):
        script.run()


def test_copy_that_comes_too_late_is_found() -> None:
    script = started()
    script.fork(0, 1, 1)
    script.table(1, [0, 5], replaces=True)
    script.decode(0, 1)
    with pytest.raises(AssertionError, match=r"position 4 of slot 1 .* block 5, which was never written"):
        script.run()


def test_block_of_another_that_is_used_again_is_found_though_its_owner_has_no_row() -> None:
    for checks_idle_slots in (True, False):
        script = started(checks_idle_slots=checks_idle_slots)
        script.add(1, [40, 41], [1])
        script.row(1, 2)
        if checks_idle_slots:
            with pytest.raises(AssertionError, match=r"position 4 of slot 0 .* holds position 0 of slot 1"):
                script.run()
        else:
            script.run()
            with pytest.raises(AssertionError, match="position 4 of slot 0"):
                script.worker.check_integrity()


def test_stale_cache_hit_is_found() -> None:
    script = started()
    script.add(1, [*PROMPT[:3], 99, 4], [0, 3], computed=4)
    script.row(1, 1)
    with pytest.raises(AssertionError, match=r"position 3 of slot 1 .* block 0, which holds position 3 of slot 0"):
        script.run()


# ---- Failures -------------------------------------------------------------------------------------------------------


def test_failure_before_leaves_nothing_and_skips_until_resumed() -> None:
    script = started()
    script.step.released_slots_u16 = u16([0])
    result = script.run(fails="before")
    assert result.status == worker_pb2.STEP_STATUS_FAILED and not result.error.block_operations_applied
    script.decode(0)
    assert script.run().status == worker_pb2.STEP_STATUS_SKIPPED
    script.decode(0)
    script.step.resume_after = 2
    assert script.tokens() == [expected_tokens(PROMPT, 0, 8, eos=None)[-1]]


def test_failure_after_keeps_block_operations_and_leaves_rubbish() -> None:
    script = started()
    script.table(0, [2])
    script.add(1, [9, 9, 9, 9], [4])
    script.decode(0)
    script.row(1, 4)
    result = script.run(fails="after")
    assert result.error.block_operations_applied and script.worker.states.num_blocks[0] == 3
    script.step.resume_after = 2
    script.decode(0)  # writes its place again
    assert len(tokens_of(script.run())) == 1
    script.add(2, [9, 9, 9, 9, 8], [4, 5], computed=4)  # as if the block of the failed row were still published
    script.row(2, 1)
    with pytest.raises(AssertionError, match=r"position 0 of slot 2 .* block 4, which was written by a failed step"):
        script.run()


def test_row_error_spoils_whoever_reads_its_blocks_and_nobody_else() -> None:
    script = started(row_error=lambda history: "too odd" if 77 in history else None)
    script.add(1, [77, 1, 2, 3, 4], [2, 3])
    script.add(2, [77, 1, 2, 3, 5], [2, 4], computed=4)  # published in the same step
    script.decode(0)
    script.row(1, 5)
    script.row(2, 1)
    outputs = script.run().outputs
    assert np.frombuffer(outputs.num_tokens_u16, "<u2").tolist() == [1, 0, 0]
    assert [(error.row, error.message) for error in outputs.row_errors] == [(1, "too odd"), (2, "too odd")]
    assert len(outputs.token_ids_i32) == 4
    script = started(row_error=lambda history: "too odd" if history[-1] == 77 else None)
    script.add(1, [1, 2, 3, 77], [2])
    script.row(1, 4)
    script.run()
    script.add(2, [1, 2, 3, 77, 5], [2, 4], computed=4)
    script.decode(0)
    script.row(2, 1)
    outputs = script.run().outputs
    assert [error.message for error in outputs.row_errors] == ["slot 2 reads what is not finite"]
    assert len(outputs.token_ids_i32) == 4 and script.history(0) == expected_tokens(PROMPT, 0, 8, eos=None)


def test_a_step_out_of_order_is_an_error_of_the_test_itself() -> None:
    script = started()
    script.step_id += 1
    with pytest.raises(AssertionError, match="step 3 after step 1"):
        script.run()
