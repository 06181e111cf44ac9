"""The worker's mirror of what the scheduler knows about every slot: the tested inverse of the step encoder.

Columns by slot (a slot is a row of the persistent batch), changed only by `apply_blocks`, `apply_rows`,
`record_samples` (or its two halves, where a step is sent off before its outputs are here) and `roll_back`. Decides
nothing, computes no tokens, knows neither torch nor gRPC. A steady decode step builds no Python object a sequence; only
new metadata and forks are looped over.

A step is applied in two halves, so that block operations run before anything that can fail:

    apply_blocks   fields 3 to 9: released slots, forks, metadata, (swaps and copies, given back), block tables
    apply_rows     field 10: rows are resolved, their slots' computed tokens move on

Either half happens whole or raises ProtocolError and leaves the columns as they were. Tokens of one slot:

    0 ........ num_computed_tokens ........ num_tokens ........ max_model_len
    | K and V in cache  | known, not computed  | the next sample goes to num_tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from worker_svc.errors import ProtocolError
from worker_svc.mirror.row_checks import check_rows
from worker_svc.mirror.sequence_metadata import NewSequence, read_group
from worker_svc.mirror.slot_columns import SlotColumns
from worker_svc.mirror.step_columns import (
    BlockOperations,
    Ints,
    RowColumns,
    TableChange,
    ragged_offsets,
    read_column,
    read_operations,
    read_rows,
    read_slots,
    read_table_change,
)

UNKNOWN = -(1 << 31)
"""In place of a token that was drawn on the device and is on its way to the host."""

__all__ = ["UNKNOWN", "AppliedRows", "AppliedStep", "BlockOperations", "ProtocolError", "SequenceStates"]


@dataclass(frozen=True, slots=True)
class AppliedRows:
    """The rows of a step, resolved against the mirror. R rows, N samples in the order of the rows.

    A sample is one entry of the answer: a draw, which `record_samples` appends to its slot, or, in a beam search, a
    candidate, which is answered and leaves the mirror as it is.
    """

    slots: Ints  # [R]
    context_lens: Ints  # [R], tokens in the cache before this step
    query_lens: Ints  # [R], tokens that this step computes
    seq_lens: Ints  # [R], the sum of both
    num_samples: Ints  # [R]
    uses_last_sampled: npt.NDArray[np.bool_]  # [R]
    sample_rows: Ints  # [N], the row whose last token's logits the sample is taken from
    sample_slots: Ints  # [N], the slot that the drawn token is appended to; of a candidate, its row's own
    sample_indices: Ints  # [N], index of that slot's sequence in its group
    sample_positions: Ints  # [N], absolute position that the token gets
    is_candidate: npt.NDArray[np.bool_]  # [N]
    draws: npt.NDArray[np.bool_] | slice  # the samples that are no candidates
    touched_slots: Ints  # slots whose columns the rows changed, for `roll_back`
    computed_before: Ints  # of touched_slots
    tokens_before: Ints  # of touched_slots


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """Both halves of a step."""

    operations: BlockOperations
    rows: AppliedRows


class SequenceStates(SlotColumns):
    """The columns, and the only way to change them."""

    def apply(self, step: worker_pb2.Step) -> AppliedStep:
        """Both halves at once, for callers without a cache to operate on."""
        operations = self.apply_blocks(step)
        return AppliedStep(operations, self.apply_rows(step))

    # ---- Fields 3 to 9 ----------------------------------------------------------------------------------------------

    def apply_blocks(
        self, step: worker_pb2.Step, operate: Callable[[BlockOperations], None] | None = None
    ) -> BlockOperations:
        """Applies everything but the rows; gives back what the cache engine has to do.

        `operate` is to do it: it is called once the step has been found good and before a column changes, so that a
        step whose operations fail has not taken effect. After a failure (`resume_after` is set) released slots may be
        empty: their metadata may have been in a step that was skipped.
        """
        occupied, num_blocks = self.occupied.copy(), self.num_blocks.copy()
        released = self._check_released(step, occupied)
        num_blocks[released] = 0
        forks = self._check_forks(step, occupied)
        for parent, child, _ in forks:
            num_blocks[child] = num_blocks[parent]
        sequences = self._check_groups(step, occupied)
        for sequence in sequences:
            num_blocks[sequence.slot] = sequence.block_table.size
        operations = read_operations(step, self.num_device_blocks, self.num_host_blocks)
        changes = self._check_tables(step, occupied, num_blocks)
        if operate is not None:
            operate(operations)

        if released.size:
            self._release(released)
        for parent, child, index in forks:
            self._fork(parent, child, index)
        for sequence in sequences:
            self._add(sequence)
        for change in changes:
            self._change_tables(change)
        return operations

    def _check_released(self, step: worker_pb2.Step, occupied: npt.NDArray[np.bool_]) -> Ints:
        released = read_slots(step.released_slots_u16, self.max_num_seqs, "released_slots")
        if not released.size:
            return released
        empty = released[~occupied[released]]
        if empty.size and not step.HasField("resume_after"):
            raise ProtocolError(f"released slot {empty[0]} is not occupied")
        occupied[released] = False
        return released

    def _check_forks(self, step: worker_pb2.Step, occupied: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
        """(parent slot, child slot, index of the child in its group) of each fork."""
        if not (step.forks_u16 or step.fork_indices_u16):
            return []
        slots = read_slots(step.forks_u16, self.max_num_seqs, "forks", unique=False)
        if slots.size % 2:
            raise ProtocolError(f"forks holds {slots.size} slots, which are no pairs")
        indices = read_column(step.fork_indices_u16, "<u2", "fork_indices")
        if indices.size != slots.size // 2:
            raise ProtocolError(f"{indices.size} fork_indices for {slots.size // 2} forks")
        forks = list(zip(slots[::2].tolist(), slots[1::2].tolist(), indices.tolist(), strict=True))
        for parent, child, _ in forks:
            if not occupied[parent]:
                raise ProtocolError(f"fork of slot {parent}, which is not occupied")
            if occupied[child]:
                raise ProtocolError(f"fork into slot {child}, which is occupied")
            occupied[child] = True
        return forks

    def _check_groups(self, step: worker_pb2.Step, occupied: npt.NDArray[np.bool_]) -> list[NewSequence]:
        sequences = [sequence for group in step.groups for sequence in read_group(group, self)]
        for sequence in sequences:
            if occupied[sequence.slot]:
                raise ProtocolError(f"metadata of {sequence.request_id!r} for slot {sequence.slot}, which is occupied")
            occupied[sequence.slot] = True
        return sequences

    def _check_tables(
        self, step: worker_pb2.Step, occupied: npt.NDArray[np.bool_], num_blocks: Ints
    ) -> list[TableChange]:
        changes = []
        for update in step.block_tables:
            change = read_table_change(update, self.max_num_seqs, self.num_device_blocks)
            slots = change.slots
            if not occupied[slots].all():
                raise ProtocolError(f"block table of slot {slots[~occupied[slots]][0]}, which is not occupied")
            num_blocks[slots] = change.counts if change.replaces else num_blocks[slots] + change.counts
            if (too_long := num_blocks[slots] > self.max_blocks).any():
                slot = slots[too_long][0]
                raise ProtocolError(f"slot {slot} gets {num_blocks[slot]} blocks, more than {self.max_blocks}")
            changes.append(change)
        return changes

    def _release(self, slots: Ints) -> None:
        self.occupied[slots] = False
        self.num_tokens[slots] = 0
        self.num_computed_tokens[slots] = 0
        self.num_blocks[slots] = 0
        self.adapter_numbers[slots] = -1
        for slot in slots.tolist():
            self.sampling.clear(slot)
            self.adapters[slot] = ""
            self.request_ids[slot] = None
            self.sampling_params[slot] = None

    def _fork(self, parent: int, child: int, index: int) -> None:
        self.occupied[child] = True
        self.sequence_index[child] = index
        num_tokens, num_blocks = int(self.num_tokens[parent]), int(self.num_blocks[parent])
        self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
        self.block_tables[child, :num_blocks] = self.block_tables[parent, :num_blocks]
        for column in (self.num_tokens, self.num_computed_tokens, self.num_blocks):
            column[child] = column[parent]
        self.num_prompt_tokens[child] = self.num_prompt_tokens[parent]
        self.tenancy[child] += 1
        self.sampling.copy(parent, child)
        self.adapters[child] = self.adapters[parent]
        self.adapter_numbers[child] = self.adapter_numbers[parent]
        self.request_ids[child] = self.request_ids[parent]
        self.sampling_params[child] = self.sampling_params[parent]

    def _add(self, sequence: NewSequence) -> None:
        slot = sequence.slot
        self.occupied[slot] = True
        self.token_ids[slot, : sequence.token_ids.size] = sequence.token_ids
        self.block_tables[slot, : sequence.block_table.size] = sequence.block_table
        self.num_tokens[slot] = sequence.token_ids.size
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self.num_blocks[slot] = sequence.block_table.size
        self.sequence_index[slot] = sequence.index
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.tenancy[slot] += 1
        self.sampling.set(slot, sequence.params, sequence.stop_token_ids, sequence.bad_words)
        self.adapters[slot] = sequence.adapter
        self.adapter_numbers[slot] = self.loaded_adapters[sequence.adapter] if sequence.adapter else -1
        self.request_ids[slot] = sequence.request_id
        self.sampling_params[slot] = sequence.params

    def _change_tables(self, change: TableChange) -> None:
        slots, counts = change.slots, change.counts
        starts = np.zeros_like(counts) if change.replaces else self.num_blocks[slots]
        columns = np.repeat(starts, counts) + ragged_offsets(counts)
        self.block_tables[np.repeat(slots, counts), columns] = change.block_ids
        self.num_blocks[slots] = starts + counts

    # ---- Field 10 and what follows from it --------------------------------------------------------------------------

    def apply_rows(self, step: worker_pb2.Step) -> AppliedRows:
        """Resolves the rows and moves their slots' computed tokens on; given tokens enter the history."""
        columns = read_rows(step.rows, self.max_num_seqs)
        slots, query_lens, num_samples = columns.slots, columns.query_lens, columns.num_samples
        context_lens, tokens_before = self.num_computed_tokens[slots], self.num_tokens[slots]
        seq_lens, num_tokens = context_lens + query_lens, tokens_before
        is_given = columns.inputs == worker_pb2.ROW_INPUT_GIVEN_TOKENS
        if columns.given_token_ids.size:
            num_tokens = np.where(is_given, seq_lens, tokens_before)
        check_rows(self, columns, seq_lens, tokens_before, num_tokens)

        sample_rows, sample_slots = np.arange(slots.size), slots
        if columns.num_decode_rows < slots.size:
            sample_rows = np.repeat(sample_rows, num_samples)
            sample_slots = slots[sample_rows]
        is_candidate = self.sampling.use_beam_search[sample_slots]
        touched_slots, computed_before = slots, context_lens
        child_slots = columns.child_slots
        if child_slots.size:
            is_child = (num_samples[sample_rows] > 1) & ~is_candidate
            parent_slots = sample_slots[is_child]
            sample_slots[is_child] = child_slots
            touched_slots = np.union1d(slots, child_slots)
            computed_before, tokens_before = self.num_computed_tokens[touched_slots], self.num_tokens[touched_slots]

        if columns.given_token_ids.size:
            self._take_given(columns, is_given, context_lens)
            self.num_tokens[slots] = num_tokens
        self.num_computed_tokens[slots] = seq_lens
        if child_slots.size:
            self._follow_parents(child_slots, parent_slots)
        return AppliedRows(
            slots=slots,
            context_lens=context_lens,
            query_lens=query_lens,
            seq_lens=seq_lens,
            num_samples=num_samples,
            uses_last_sampled=columns.inputs == worker_pb2.ROW_INPUT_LAST_SAMPLED,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_indices=self.sequence_index[sample_slots],
            sample_positions=self.num_tokens[sample_slots],
            is_candidate=is_candidate,
            draws=~is_candidate if is_candidate.any() else slice(None),
            touched_slots=touched_slots,
            computed_before=computed_before,
            tokens_before=tokens_before,
        )

    def _take_given(self, columns: RowColumns, is_given: npt.NDArray[np.bool_], context_lens: Ints) -> None:
        counts = columns.query_lens[is_given]
        positions = np.repeat(context_lens[is_given], counts) + ragged_offsets(counts)
        self.token_ids[np.repeat(columns.slots[is_given], counts), positions] = columns.given_token_ids

    def _follow_parents(self, child_slots: Ints, parent_slots: Ints) -> None:
        """Children stand where the row that they are drawn from stands."""
        for child, parent in zip(child_slots.tolist(), parent_slots.tolist(), strict=True):
            if child != parent:
                num_tokens = int(self.num_tokens[parent])
                self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
                self.num_tokens[child] = num_tokens
                self.num_computed_tokens[child] = self.num_computed_tokens[parent]

    def record_samples(self, rows: AppliedRows, token_ids: npt.NDArray[np.integer]) -> None:
        """Appends the drawn ones of `token_ids`, int [N] in the order of the samples, to their slots.

        A row that could not be drawn still gets a token (any): its slot keeps step with the scheduler, which may have
        sent the next row already and drops the answer of both.
        """
        self.fill_in_samples(rows, token_ids, self.expect_samples(rows))

    def expect_samples(self, rows: AppliedRows) -> Ints:
        """Gives each drawn sample its place before its token is known: UNKNOWN stands there until `fill_in_samples`.

        The tenancies [N] that it wants back, by which it knows slots that have come to have other sequences meanwhile.
        """
        slots, positions = rows.sample_slots[rows.draws], rows.sample_positions[rows.draws]
        self.token_ids[slots, positions] = UNKNOWN
        self.num_tokens[slots] = positions + 1
        return self.tenancy[rows.sample_slots]

    def fill_in_samples(self, rows: AppliedRows, token_ids: npt.NDArray[np.integer], tenancies: Ints) -> None:
        """The tokens of samples that were expected; other steps may have been applied since."""
        slots, positions = rows.sample_slots[rows.draws], rows.sample_positions[rows.draws]
        meant = self.tenancy[slots] == tenancies[rows.draws]
        self.token_ids[slots[meant], positions[meant]] = token_ids[rows.draws][meant]

    def roll_back(self, rows: AppliedRows) -> None:
        """Undoes `apply_rows`, and `record_samples` or `expect_samples` where one has run, after a failure.

        Steps that were applied since have to be rolled back before.
        """
        self.num_computed_tokens[rows.touched_slots] = rows.computed_before
        self.num_tokens[rows.touched_slots] = rows.tokens_before
        self.tenancy[rows.touched_slots] += 1  # other tokens may come to stand where some stood

    def check_integrity(self) -> None:
        """Raises AssertionError, naming the slot, when the columns contradict each other."""
        empty = ~self.occupied
        columns = (self.num_tokens, self.num_computed_tokens, self.num_blocks)
        self._demand(np.logical_and.reduce([column[empty] == 0 for column in columns]), empty, "is empty but has state")
        tokens, computed, blocks = (column[self.occupied] for column in columns)
        self._demand((tokens > 0) & (tokens <= self.max_model_len), self.occupied, "has an impossible number of tokens")
        self._demand((computed >= 0) & (computed <= tokens), self.occupied, "has computed more than its tokens")
        self._demand(computed <= blocks * self.block_size, self.occupied, "has computed more than its blocks hold")
        for slot in np.flatnonzero(self.occupied).tolist():
            table = self.block_tables[slot, : self.num_blocks[slot]]
            if table.size and (table.min() < 0 or table.max() >= self.num_device_blocks):
                raise AssertionError(f"slot {slot} names a block out of range")
            if np.unique(table).size != table.size:
                raise AssertionError(f"slot {slot} names a block twice")
        for slot, request_id in enumerate(self.request_ids):
            if (request_id is not None) != bool(self.occupied[slot]):
                raise AssertionError(f"slot {slot} and its request {request_id!r} disagree")

    def _demand(self, holds: npt.NDArray[np.bool_], where: npt.NDArray[np.bool_], complaint: str) -> None:
        if not holds.all():
            raise AssertionError(f"slot {np.flatnonzero(where)[~holds][0]} {complaint}")
