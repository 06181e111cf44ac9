"""A worker without sockets, threads, time or mathematics, whose cache remembers what was computed in it.

It keeps the real mirror. Its cache holds, in place of keys and values, the content of each position (`fake_language`):
a hash of the whole history up to there. A step writes the contents of all its rows, as every layer writes keys and
values before any row's attention, then reads every position that it attends to back through the block tables. A wrong
table, a block used twice, a copy or swap that is missing or came too late, or a block found in the prefix cache that
does not hold what it should, is an AssertionError at once, which names slot and block.

A step that contradicts the mirror raises ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from protos import worker_pb2
from tests.scheduler.fake_language import VOCAB_SIZE, extended, start_of
from tests.scheduler.simulated_answers import NOTHING_TO_DRAW, ContentLanguage, History, Language, answer
from worker_svc.cache.cached_blocks import CachedBlocks
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import BlockOperations, Ints, ragged_offsets
from worker_svc.sampling.prompt_logprobs import PromptLogprobs

# Contents that are none, below all hashes.
UNWRITTEN = -1
NOT_FINITE = -2  # of a row that ended in an error: whoever reads it ends in an error as well
LOST = -3  # of a step that failed after its block operations: nobody may read it

_CONTENTS: dict[bytes, Ints] = {}  # by the hash that a scheduler was told of

RowErrorOf = Callable[[History], str | None]


class SimulatedWorker:
    """Runs steps in order, as `worker_svc.steps.worker.Worker` does. Counters are of steps that went well."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        vocab_size: int = VOCAB_SIZE,
        *,
        language: Language | None = None,
        max_loras: int = 0,
        row_error: RowErrorOf | None = None,
        checks_idle_slots: bool = True,
    ) -> None:
        """`language` replaces that of `vocab_size` tokens; `row_error` says which histories cannot go on, and why.

        Without `checks_idle_slots` only slots with a row in the step have their blocks read, not all that are occupied.
        """
        self.states = SequenceStates(num_slots, max_model_len, block_size, num_device_blocks, num_host_blocks)
        self.device = np.full((num_device_blocks, block_size), UNWRITTEN, np.int64)
        self.host = np.full((num_host_blocks, block_size), UNWRITTEN, np.int64)
        self.num_steps = self.num_tokens_computed = 0
        self.num_swapped_out = self.num_swapped_in = self.num_copied = 0  # blocks
        self._language = language or ContentLanguage(vocab_size)
        self._max_loras, self._row_error = max_loras, row_error
        self._checks_idle_slots = checks_idle_slots
        self._generations: dict[str, int] = {}  # of loaded adapters
        self._own = np.zeros((num_slots, max_model_len), np.int64)  # contents of the slots' own histories
        self._num_known = [0] * num_slots  # positions of `_own` that are filled
        self._last_step_id = 0
        self._failed_step_id: int | None = None
        self.cached = CachedBlocks(num_device_blocks)

    def begin_lease(self) -> worker_pb2.CachedBlocks:
        """For another scheduler: an empty mirror, and what the cache still holds."""
        old = self.states
        cached = self.cached.told(old)
        self.states = SequenceStates(
            old.max_num_seqs, old.max_model_len, old.block_size, old.num_device_blocks, old.num_host_blocks
        )
        self._num_known = [0] * old.max_num_seqs
        self._last_step_id, self._failed_step_id = 0, None
        self._check_told(cached)
        return cached

    def load_adapter(self, name: str, generation: int = 1) -> None:
        """Groups of that adapter may come from now on."""
        self._generations[name] = generation
        self.states.loaded_adapters[name] = len(self.states.loaded_adapters)

    def unload_adapter(self, name: str) -> None:
        """Groups of that adapter are refused from now on."""
        del self._generations[name]
        del self.states.loaded_adapters[name]
        assert name not in self.states.adapters, f"adapter {name!r} is unloaded while a slot uses it"

    def run(self, step: worker_pb2.Step, fails: str | None = None) -> worker_pb2.StepResult:
        """The answer to a step.

        `fails` "before": nothing of it takes effect; "after": its block operations do, and its rows leave rubbish where
        they would have written.
        """
        self.cached.forget(step)
        if self._failed_step_id is not None and step.resume_after != self._failed_step_id:
            return worker_pb2.StepResult(step_id=step.step_id, status=worker_pb2.STEP_STATUS_SKIPPED)
        if self._failed_step_id is None:
            assert step.step_id == self._last_step_id + 1, f"step {step.step_id} after step {self._last_step_id}"
        self._failed_step_id, self._last_step_id = None, step.step_id
        if fails == "before":
            return self._fail(step, operated=False)
        self.states.apply_blocks(step, partial(self._operate, step))
        self._forget_changed_histories(step)
        rows = self.states.apply_rows(step)
        self.cached.compute(self.states, rows)
        if fails is not None:
            self._write(rows, LOST)
            self.states.roll_back(rows)
            return self._fail(step, operated=True)
        self._check_adapters(rows)
        outputs = self._compute(rows)
        self.cached.promise(step, self.states)
        self._distrust(rows, outputs)
        self.num_steps += 1
        self.num_tokens_computed += int(rows.query_lens.sum())
        return worker_pb2.StepResult(step_id=step.step_id, outputs=outputs)

    def check_integrity(self) -> None:
        """The mirror's own check, and that every occupied slot finds its history in its blocks."""
        self.states.check_integrity()
        self.cached.check_integrity()
        self._read(np.flatnonzero(self.states.occupied))

    # ---- Block operations -------------------------------------------------------------------------------------------

    def _operate(self, step: worker_pb2.Step, operations: BlockOperations) -> None:
        self.cached.begin(step, self.states, operations)
        for pairs, source, destination in (
            (operations.swap_out, self.device, self.host),
            (operations.swap_in, self.host, self.device),
            (operations.copies, self.device, self.device),
        ):
            if pairs.size:
                destination[pairs[:, 1]] = source[pairs[:, 0]]
        self.num_swapped_out += len(operations.swap_out)
        self.num_swapped_in += len(operations.swap_in)
        self.num_copied += len(operations.copies)

    def _distrust(self, rows: AppliedRows, outputs: worker_pb2.SequenceOutputs) -> None:
        of_model = worker_pb2.ROW_ERROR_KIND_MODEL
        bad_rows = [error.row for error in outputs.row_errors if error.kind == of_model]
        if bad_rows:
            self.cached.fail_over(self.states, rows.slots[bad_rows])

    def _check_told(self, cached: worker_pb2.CachedBlocks) -> None:
        """Each block that another scheduler is told of holds what it held when it was first told of under its hash."""
        blocks = np.frombuffer(cached.block_ids_u32, "<u4")
        for number, block in enumerate(blocks.tolist()):
            digest, content = cached.hashes[32 * number : 32 * number + 32], self.device[block]
            assert (content >= 0).all(), f"block {block} is told of, and holds {content.tolist()}"
            before = _CONTENTS.setdefault(digest, content.copy())
            assert (before == content).all(), f"block {block} is told of under the hash of another content"

    def _forget_changed_histories(self, step: worker_pb2.Step) -> None:
        changed = [sequence.slot for group in step.groups for sequence in group.sequences]
        for column, stride in ((step.released_slots_u16, 1), (step.forks_u16, 2), (step.rows.child_slots_u16, 1)):
            changed += np.frombuffer(column, "<u2")[stride - 1 :: stride].tolist()
        for slot in changed:
            self._num_known[slot] = 0

    def _fail(self, step: worker_pb2.Step, operated: bool) -> worker_pb2.StepResult:
        self._failed_step_id = step.step_id
        error = worker_pb2.StepError(message="told to fail", block_operations_applied=operated)
        return worker_pb2.StepResult(step_id=step.step_id, status=worker_pb2.STEP_STATUS_FAILED, error=error)

    def _check_adapters(self, rows: AppliedRows) -> None:
        if self._generations:
            used = {self.states.adapters[slot] for slot in rows.slots.tolist()} - {""}
            assert len(used) <= self._max_loras, f"{sorted(used)} in one step, at most {self._max_loras} adapters fit"

    # ---- Rows -------------------------------------------------------------------------------------------------------

    def _compute(self, rows: AppliedRows) -> worker_pb2.SequenceOutputs:
        self._write(rows)
        errors = self._own_errors(rows)
        slots = np.flatnonzero(self.states.occupied) if self._checks_idle_slots else rows.slots
        not_finite = self._read(slots)
        for row in np.flatnonzero(rows.num_samples).tolist():
            if int(rows.slots[row]) in not_finite and row not in errors:
                errors[row] = f"slot {rows.slots[row]} reads what is not finite"
        ends = (rows.context_lens + rows.query_lens)[rows.sample_rows] - 1
        contents = self._own[rows.slots[rows.sample_rows], ends].tolist()
        outputs = answer(self.states, rows, contents, self._language, errors)
        self._answer_prompts(rows, outputs)
        return outputs

    def _answer_prompts(self, rows: AppliedRows, outputs: worker_pb2.SequenceOutputs) -> None:
        of_prompts = PromptLogprobs(self.states, rows)
        if (reader := of_prompts.reader("cpu")) is None:
            return
        slots = np.repeat(rows.slots, rows.query_lens)
        positions = np.repeat(rows.context_lens, rows.query_lens) + ragged_offsets(rows.query_lens)
        for row in reader.rows.tolist():
            slot, position = slots[row], positions[row]
            history, content = self.states.token_ids[slot, : position + 1], int(self._own[slot, position])
            reader.take(torch.from_numpy(self._language.logprobs(history, content))[None])
        of_prompts.pack(outputs)

    def _write(self, rows: AppliedRows, rubbish: int | None = None) -> None:
        """The contents of the rows' new positions, in order of histories rather than rows, to the slots' blocks."""
        for slot, first, end in self._spans(rows):
            self._num_known[slot] = min(self._num_known[slot], first)
            if rubbish is None:
                self._know(slot, end)
        slots = np.repeat(rows.slots, rows.query_lens)
        positions = np.repeat(rows.context_lens, rows.query_lens) + ragged_offsets(rows.query_lens)
        contents = self._own[slots, positions] if rubbish is None else rubbish
        self.device.reshape(-1)[self._places(slots, positions)] = contents

    def _own_errors(self, rows: AppliedRows) -> dict[int, str]:
        """Message by row; what such a row has written is not finite, except with NOTHING_TO_DRAW."""
        errors: dict[int, str] = {}
        if self._row_error is None:
            return errors
        for row in np.flatnonzero(rows.num_samples).tolist():
            slot, first, end = int(rows.slots[row]), int(rows.context_lens[row]), self._end(rows, row)
            if (message := self._row_error(self.states.token_ids[slot, :end])) is not None:
                errors[row] = message
                if message == NOTHING_TO_DRAW:
                    continue
                positions = np.arange(first, end)
                self.device.reshape(-1)[self._places(np.full(end - first, slot), positions)] = NOT_FINITE
        return errors

    def _read(self, slots: Ints) -> set[int]:
        """Reads all computed positions of `slots` through their tables; gives the slots that find NOT_FINITE."""
        lengths = self.states.num_computed_tokens[slots]
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self._know(slot, length)
        token_slots, positions = np.repeat(slots, lengths), ragged_offsets(lengths)
        found = self.device.reshape(-1)[self._places(token_slots, positions)]
        differs = found != self._own[token_slots, positions]
        if not differs.any():
            return set()
        if (wrong := np.flatnonzero(differs & (found != NOT_FINITE))).size:
            first = wrong[0]
            raise AssertionError(self._describe(int(token_slots[first]), int(positions[first]), int(found[first])))
        return set(token_slots[differs].tolist())

    def _places(self, slots: Ints, positions: Ints) -> Ints:
        block_size = self.states.block_size
        blocks = self.states.block_tables[slots, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size

    def _know(self, slot: int, end: int) -> None:
        """Fills `_own` of a slot up to `end` from the history in the mirror."""
        known = self._num_known[slot]
        if known >= end:
            return
        adapter = self.states.adapters[slot]
        content = int(self._own[slot, known - 1]) if known else start_of(adapter, self._generations.get(adapter, 1))
        contents = []
        for token in self.states.token_ids[slot, known:end].tolist():
            content = extended(content, token)
            contents.append(content)
        self._own[slot, known:end] = contents
        self._num_known[slot] = end

    def _describe(self, slot: int, position: int, found: int) -> str:
        block_size, states = self.states.block_size, self.states
        block = states.block_tables[slot, position // block_size]
        what = {UNWRITTEN: "was never written", LOST: "was written by a failed step"}.get(found, "")
        if not what:
            owners = [
                f"holds position {index} of slot {other} ({states.request_ids[other]})"
                for other in np.flatnonzero(states.occupied).tolist()
                for index in np.flatnonzero(self._own[other, : self._num_known[other]] == found).tolist()
            ]
            what = owners[0] if owners else "holds a history that no slot has"
        return (
            f"step {self._last_step_id}: position {position} of slot {slot} ({states.request_ids[slot]}) is read from "
            f"block {block}, which {what}"
        )

    @staticmethod
    def _end(rows: AppliedRows, row: int) -> int:
        return int(rows.context_lens[row] + rows.query_lens[row])

    @staticmethod
    def _spans(rows: AppliedRows) -> list[tuple[int, int, int]]:
        """(slot, first computed position, the position after the last) of each row."""
        ends = rows.context_lens + rows.query_lens
        return list(zip(rows.slots.tolist(), rows.context_lens.tolist(), ends.tolist(), strict=True))
