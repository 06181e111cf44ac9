"""Decides what one worker computes in its next step: continuous batching with chunked prefill under a token budget.

There are no phases: a sequence's computed tokens catch up with its tokens, whether they are a prompt, a chunk of one, a
recomputation after preemption or the last draw. Decodes come first, then prompts that are half computed, then groups
that come back, then new ones. Knows nothing of clocks (time is passed in), sockets, text or the wire.
"""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

from scheduler_svc.block_manager import AllocStatus, BlockSpaceManager
from scheduler_svc.policy import Policy
from scheduler_svc.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.sequence_columns import Ints, SequenceColumns, TokenIds
from scheduler_svc.step_plan import Introduction, NewTokens, ScheduledRows, SchedulerOutputs, StepPlan
from scheduler_svc.waiting_queue import WaitingQueue

# Tokens of full metadata in one step: at five bytes each (the longest varint of an id) a third of the message limit.
MAX_INTRODUCED_TOKENS = 4 * 1024 * 1024
NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))  # an empty entry of StepPlan.appended


class Scheduler:
    """The running and preempted groups of one worker.

    Args:
        columns, blocks: the worker's slots and cache.
        max_num_batched_tokens: tokens that one step computes at most.
        policy: sort key of groups; the last in its order is preempted first.
    """

    def __init__(
        self, columns: SequenceColumns, blocks: BlockSpaceManager, max_num_batched_tokens: int, policy: Policy
    ) -> None:
        self.columns = columns
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.running: set[SequenceGroup] = set()
        self.prefilling: list[Sequence] = []  # tokens known to the worker not all computed, in order of their start
        self.preempted: list[SequenceGroup] = []  # in policy order
        self.suspects: deque[SequenceGroup] = deque()  # were in a failed step: each runs one step alone
        self._unknown: set[Sequence] = set()  # have a slot, but the worker was not told of them yet
        self._released_slots: set[int] = set()

    # ---- deciding a step --------------------------------------------------------------------------------------------

    def schedule(self, waiting: WaitingQueue, now_ns: int) -> SchedulerOutputs | None:
        """Fills one step; None when nothing can run (what was released then waits for the next step)."""
        plan = StepPlan(tokens_left=self.max_num_batched_tokens)
        alone = self.suspects[0] if self.suspects else None
        self._add_decodes(plan, alone)
        self._add_chunks(plan, alone)
        if alone is None and not plan.num_preempted:
            self._admit(plan, waiting, now_ns)
        return self._seal(plan)

    def _add_decodes(self, plan: StepPlan, alone: SequenceGroup | None) -> None:
        """Gives every decode its next position; preempts while there are fewer free blocks than borders to cross."""
        slots = self.columns.decodable_slots()
        if alone is not None:
            slots = np.intersect1d(slots, [sequence.slot for sequence in alone.unfinished()])
        at_border = self.blocks.slots_at_border(slots)
        while len(at_border) > self.blocks.num_free_blocks:
            self._preempt(self._choose_victim(), plan)
            slots = slots[self.columns.occupied[slots]]
            at_border = at_border[self.columns.occupied[at_border]]
        if len(at_border):
            plan.appended.append((at_border, np.ones_like(at_border), self.blocks.grow_by_one(at_border)))
        self.columns.num_computed_tokens[slots] += 1
        self.columns.num_placeholders[slots] += 1
        plan.decode_slots = slots
        plan.tokens_left -= len(slots)

    def _add_chunks(self, plan: StepPlan, alone: SequenceGroup | None) -> None:
        """Continues prompts that have begun, oldest first, as far as the budget reaches."""
        for sequence in list(self.prefilling):
            if plan.tokens_left <= 0:
                return
            if sequence.status is SequenceStatus.RUNNING and alone in (None, sequence.group):
                self._add_chunk(plan, sequence)

    def _add_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Computes as many known tokens of a sequence as budget and blocks allow, maybe none.

        Takes blocks only from prompts that began later, which have no row in this step yet: the oldest always gets on,
        so half-computed prompts cannot block each other, and decodes give blocks back when they end.
        """
        columns, slot = self.columns, sequence.slot
        is_unknown = sequence in self._unknown
        if (
            is_unknown
            and plan.introduced_tokens
            and plan.introduced_tokens + sequence.num_tokens > MAX_INTRODUCED_TOKENS
        ):
            return
        computed, known = int(columns.num_computed_tokens[slot]), int(columns.num_known_tokens[slot])
        query_len = min(known - computed, plan.tokens_left)
        while self.blocks.num_blocks_missing(slot, computed + query_len) > self.blocks.num_free_blocks:
            if self.prefilling[-1] is sequence:
                room = int(columns.num_blocks[slot]) + self.blocks.num_free_blocks
                query_len = min(query_len, room * self.blocks.block_size - computed)
                break
            self._preempt(self.prefilling[-1].group, plan)
        if query_len <= 0:
            return
        blocks = self.blocks.grow(slot, computed + query_len)
        if is_unknown:
            self._unknown.remove(sequence)
            plan.introduce(Introduction(sequence, computed))
        elif len(blocks):
            plan.appended.append((np.array([slot]), np.array([len(blocks)]), blocks))
        is_last = computed + query_len == known
        columns.num_computed_tokens[slot] += query_len
        columns.num_placeholders[slot] += is_last
        if is_last:
            self.prefilling.remove(sequence)
        plan.chunks.append((sequence, query_len, int(is_last)))
        plan.tokens_left -= query_len

    def _admit(self, plan: StepPlan, waiting: WaitingQueue, now_ns: int) -> None:
        """Starts groups while there is room: those that were preempted first, in order, none overtaken."""
        while plan.tokens_left > 0:
            group = self.preempted[0] if self.preempted else waiting.peek()
            if group is None or not self._can_admit(group):
                return
            if self.preempted:
                self.preempted.pop(0)
            else:
                waiting.pop()
            if group.first_scheduled_ns is None:
                group.first_scheduled_ns = now_ns
            self.running.add(group)
            for sequence in group.unfinished():
                sequence.attach(self.columns)
                self.prefilling.append(sequence)
                self._unknown.add(sequence)
                self._add_chunk(plan, sequence)

    def _can_admit(self, group: SequenceGroup) -> bool:
        if group.num_pending_tokens or len(group.unfinished()) > self.columns.num_free_slots:
            return False
        reserved = sum(
            self.blocks.num_blocks_missing(sequence.slot, int(self.columns.num_known_tokens[sequence.slot]))
            for sequence in self.prefilling
        )
        num_tokens = sum(sequence.num_tokens for sequence in group.unfinished())
        return self.blocks.can_allocate(num_tokens, reserved, not self.running) is AllocStatus.OK

    def _seal(self, plan: StepPlan) -> SchedulerOutputs | None:
        if not len(plan.decode_slots) and not plan.chunks:
            return None
        num_decode_rows = len(plan.decode_slots)
        chunk_slots = np.array([sequence.slot for sequence, _, _ in plan.chunks], np.int64)
        slots = np.concatenate([plan.decode_slots, chunk_slots])
        query_lens = np.ones(len(slots), np.int64)
        num_samples = np.ones(len(slots), np.int64)
        if plan.chunks:
            query_lens[num_decode_rows:] = [query_len for _, query_len, _ in plan.chunks]
            num_samples[num_decode_rows:] = [samples for _, _, samples in plan.chunks]
        rows = ScheduledRows(
            slots, num_decode_rows, query_lens, num_samples, self.columns.generation[slots], self.columns.owner[slots]
        )
        appended_slots, appended_counts, appended_blocks = map(
            np.concatenate, zip(NOTHING, *plan.appended, strict=True)
        )
        outputs = SchedulerOutputs(
            rows=rows,
            released_slots=sorted(self._released_slots),
            introductions=plan.introductions,
            appended_slots=appended_slots,
            appended_counts=appended_counts,
            appended_blocks=appended_blocks,
            num_preempted=plan.num_preempted,
        )
        self._released_slots = set()
        return outputs

    # ---- preemption -------------------------------------------------------------------------------------------------

    def _choose_victim(self) -> SequenceGroup:
        """The youngest group whose prompt is half computed, else the youngest of all."""
        candidates = {sequence.group for sequence in self.prefilling} or self.running
        return max(candidates, key=self.policy)

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Takes slots and blocks; the group is computed again later. Draws in flight still count when they arrive."""
        for sequence in group.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._give_up_slot(sequence, SequenceStatus.PREEMPTED)
        self.running.remove(group)
        if group in self.suspects:
            self.suspects.remove(group)
        bisect.insort(self.preempted, group, key=self.policy)
        group.num_preemptions += 1
        plan.num_preempted += 1

    def _give_up_slot(self, sequence: Sequence, status: SequenceStatus) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self._unknown:
            self._unknown.remove(sequence)
        else:
            self._released_slots.add(sequence.slot)
        self.blocks.free(sequence.slot)
        sequence.detach(status)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def process_outputs(
        self, rows: ScheduledRows, token_ids: TokenIds, num_tokens: Ints, errors: dict[int, str]
    ) -> NewTokens:
        """Appends the tokens of an answer, `num_tokens[i]` to row i (0 or 1), and ends sequences that are complete.

        Raises ValueError, with nothing changed, for an answer that does not fit the rows.
        """
        if len(num_tokens) != len(rows) or num_tokens.sum() != len(token_ids) or max(errors, default=0) >= len(rows):
            raise ValueError(f"an answer of {len(token_ids)} tokens does not fit {len(rows)} rows")
        columns = self.columns
        if self.suspects and self.suspects[0] in {sequence.group for sequence in rows.sequences}:
            self.suspects.popleft()
        drew = num_tokens > 0
        slots, sequences = rows.slots[drew], rows.sequences[drew]
        entries = np.arange(len(token_ids))
        is_current = columns.generation[slots] == rows.generations[drew]
        live, live_tokens = slots[is_current], token_ids[is_current]
        columns.token_ids[live, columns.num_tokens[live]] = live_tokens
        columns.num_tokens[live] += 1
        columns.num_placeholders[live] -= 1
        reasons = np.zeros(len(token_ids), np.uint8)
        reasons[is_current] = self._finish_reasons(live, live_tokens)
        wanted = is_current
        if not is_current.all():
            wanted = is_current.copy()
            for entry in np.flatnonzero(~is_current):
                sequence, generation = sequences[entry], rows.generations[drew][entry]
                if sequence.num_pending_tokens and sequence.last_generation == generation:
                    sequence.append_pending(int(token_ids[entry]))
                    reasons[entry] = _finish_reason(sequence, int(token_ids[entry]))
                    wanted[entry] = True
        for entry in np.flatnonzero(reasons):
            self.finish(sequences[entry])
        failed = [(rows.sequences[row].group, message) for row, message in errors.items()]
        failed = [(group, message) for group, message in failed if not group.is_finished]
        for group, _ in failed:
            self.abort(group)
        return NewTokens(sequences[wanted], token_ids[wanted], entries[wanted], reasons[wanted], failed)

    def _finish_reasons(self, slots: Ints, token_ids: TokenIds) -> np.ndarray:
        columns = self.columns
        reasons = np.where(columns.num_tokens[slots] >= columns.max_num_tokens[slots], FinishReason.LENGTH, 0)
        stops = token_ids == columns.eos_token_id[slots]
        for entry in np.flatnonzero(columns.has_stop_token_ids[slots]):
            stops[entry] |= int(token_ids[entry]) in columns.owner[slots[entry]].group.stop_token_ids
        reasons[stops] = FinishReason.STOP
        return reasons

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its blocks are free for the next step."""
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING:
            self._give_up_slot(sequence, SequenceStatus.FINISHED)
        sequence.status = SequenceStatus.FINISHED
        sequence.drop_pending()
        if group.is_finished:
            self.running.discard(group)
            if group in self.preempted:
                self.preempted.remove(group)
            if group in self.suspects:
                self.suspects.remove(group)

    def abort(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished():
            self.finish(sequence)

    # ---- failure ----------------------------------------------------------------------------------------------------

    def roll_back(self, rows: ScheduledRows) -> None:
        """Takes back the rows of a step that failed or was skipped; their tokens will not come."""
        is_current = self.columns.generation[rows.slots] == rows.generations
        live = rows.slots[is_current]
        self.columns.num_computed_tokens[live] -= rows.query_lens[is_current]
        self.columns.num_placeholders[live] -= rows.num_samples[is_current]
        for row in np.flatnonzero(~is_current & (rows.num_samples > 0)):
            sequence = rows.sequences[row]
            if sequence.num_pending_tokens and sequence.last_generation == rows.generations[row]:
                sequence.num_pending_tokens -= 1

    def resume(self, failed_rows: ScheduledRows) -> None:
        """Starts over after every step in flight was rolled back.

        The next step releases all slots, and each running sequence is introduced anew, its cached tokens included, so
        nothing has to be known of what the worker still applied. The groups of the failed step become suspects.
        """
        self._released_slots = set(range(self.columns.max_num_seqs))
        running = sorted(self.running, key=self.policy)
        self.prefilling = [s for group in running for s in group.unfinished() if s.status is SequenceStatus.RUNNING]
        self._unknown = set(self.prefilling)
        for sequence in self.prefilling:
            self.columns.num_known_tokens[sequence.slot] = sequence.num_tokens
        groups = {sequence.group for sequence in failed_rows.sequences}
        self.suspects = deque(sorted((group for group in groups if group in self.running), key=self.policy))

    def evacuate(self) -> list[SequenceGroup]:
        """The worker is lost: all unfinished groups, in policy order, ready to wait for another one.

        Takes nothing but the groups' tokens; slots and blocks, which may be what broke, are not used again.
        """
        groups = sorted([*self.running, *self.preempted], key=self.policy)
        for group in groups:
            for sequence in group.unfinished():
                if sequence.status is SequenceStatus.RUNNING:
                    sequence.detach(SequenceStatus.WAITING)
                sequence.status = SequenceStatus.WAITING
                sequence.drop_pending()
        self.running.clear()
        self.preempted.clear()
        return groups

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, columns and blocks contradict one another."""
        self.columns.check_integrity()
        self.blocks.check_integrity()
        seated = {s.slot for group in self.running for s in group.unfinished() if s.status is SequenceStatus.RUNNING}
        assert seated == set(np.flatnonzero(self.columns.occupied).tolist()), "running groups and slots disagree"
        assert not self.running & set(self.preempted), "a group is running and preempted"
        for sequence in self.prefilling:
            assert sequence.slot in seated, "a prefilling sequence has no slot"
            assert sequence.num_computed_tokens < self.columns.num_known_tokens[sequence.slot], "nothing to prefill"
        for group in self.preempted:
            assert all(sequence.slot < 0 for sequence in group.sequences), "a preempted group holds a slot"


def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason:
    """Whether a token that came after its sequence had given the slot up ends the sequence."""
    group = sequence.group
    if token_id == group.eos_token_id or token_id in group.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= group.max_num_tokens else FinishReason.NONE
