"""Fills a step with rows: the next position of every decode, and chunks of tokens that are known and not computed.

Takes blocks for them, from other groups where there are too few. Which groups have the step is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints
from scheduler_svc.core.step_plan import Chunk, Introduction, StepPlan
from scheduler_svc.core.worker_groups import WorkerGroups

MAX_INTRODUCED_BYTES = 20 << 20  # of full metadata in one step: a third of the message limit


class RowFiller:
    """Adds rows of running groups to a plan. `num_micro_batches`: see `SchedulerSettings`."""

    def __init__(self, groups: WorkerGroups, preemption: Preemption, num_micro_batches: int = 1) -> None:
        self._num_micro_batches = num_micro_batches
        self._groups = groups
        self._columns = groups.columns
        self._blocks = groups.blocks
        self._preemption = preemption

    def add_decodes(
        self, plan: StepPlan, alone: AbstractSet[SequenceGroup] | None, on_trial: AbstractSet[SequenceGroup]
    ) -> None:
        """Gives every decode its next position; preempts while there are fewer free blocks than they need.

        `alone`: who has the step to itself; None: all but those `on_trial`.
        """
        columns, blocks = self._columns, self._blocks
        slots = _taking_part(columns.decodable_slots(), alone, on_trial)
        if self._num_micro_batches > 1:
            slots = self._micro_batch(slots)
        num_decodes = len(slots)
        if self._groups.ready_beams:
            slots = np.append(slots, _taking_part(self._ready_beam_slots(), alone, on_trial))
        at_border, to_copy = blocks.slots_at_border(slots), blocks.slots_to_copy(slots)
        while len(at_border) + len(to_copy) > blocks.num_free_blocks:
            self._preemption.give_way(self._preemption.choose_victim(), plan)
            num_decodes = int(columns.occupied[slots[:num_decodes]].sum())
            slots = slots[columns.occupied[slots]]
            at_border, to_copy = blocks.slots_at_border(slots), blocks.slots_to_copy(slots)
            if not len(slots):  # all of a micro-batch gave way: its turn is that of others, if there are any
                self.add_decodes(plan, alone, on_trial)
                return
        if len(to_copy):
            self._copy_on_write(plan, to_copy)
        if len(at_border):
            blocks.publish(at_border)
            plan.appended.append((at_border, columns.ones[: len(at_border)], blocks.grow_by_one(at_border)))
        columns.num_computed_tokens[slots] += 1
        columns.num_placeholders[slots] += 1
        plan.decode_slots = slots[:num_decodes]
        if num_decodes < len(slots):
            plan.beams = columns.owner[slots[num_decodes:]].tolist()
            self._groups.ready_beams.difference_update(beam.group for beam in plan.beams)
        plan.budget.take(len(slots), len(slots))

    def _micro_batch(self, slots: Ints) -> Ints:
        """Of all decodes those of one micro-batch: none whose last token is still on its way, and no more than an even
        share, or one stage of the worker would have much to do while the others wait. Those that have waited longest.
        """
        columns, share = self._columns, -(-len(slots) // self._num_micro_batches)
        slots = slots[columns.num_placeholders[slots] == 0]
        if len(slots) <= share:
            return slots
        longest_ago = np.argsort(columns.last_token_ns[slots], kind="stable")[:share]
        return np.sort(slots[longest_ago])

    def _ready_beam_slots(self) -> Ints:
        groups = sorted(self._groups.ready_beams, key=self._groups.policy.key)  # the same order wherever it is played
        return np.array([sequence.slot for group in groups for sequence in group.unfinished()], np.int64)

    def _copy_on_write(self, plan: StepPlan, slots: Ints) -> None:
        plan.copies += self._blocks.copy_on_write(slots)
        owners = self._columns.owner[slots]
        plan.replaced += [owner for owner in owners if owner not in self._groups.unknown or owner in self._groups.forks]
        self._groups.moved.update(owner.group for owner in owners)

    def add_chunks(
        self, plan: StepPlan, alone: AbstractSet[SequenceGroup] | None, on_trial: AbstractSet[SequenceGroup]
    ) -> None:
        """Continues prompts that have begun, oldest first, as far as the budget reaches."""
        for sequence in list(self._groups.prefilling):
            if plan.budget.is_spent:
                return
            takes_part = sequence.group not in on_trial if alone is None else sequence.group in alone
            if sequence.slot >= 0 and takes_part:
                self.add_chunk(plan, sequence)

    def add_group(self, plan: StepPlan, group: SequenceGroup) -> None:
        """A chunk of each of its sequences that has tokens to compute, as far as budget and blocks last."""
        for sequence in [sequence for sequence in self._groups.prefilling if sequence.group is group]:
            if plan.budget.is_spent:
                return
            if sequence.slot >= 0:  # else it gave way to one before it
                self.add_chunk(plan, sequence)

    @names_group
    def add_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Computes as many known tokens of a sequence as budget and blocks allow, maybe none.

        Takes blocks only from sequences that began later, which have no row in this step yet: the oldest always gets
        on, so half-computed prompts cannot block each other, and decodes give blocks back when they end.
        """
        columns, blocks, slot = self._columns, self._blocks, sequence.slot
        is_unknown = sequence in self._groups.unknown
        if is_unknown and 0 < plan.introduced_bytes > MAX_INTRODUCED_BYTES - sequence.introduction_bytes:
            return
        if is_unknown and not columns.num_blocks[slot]:
            self._begin(sequence)
        computed, known = int(columns.num_computed_tokens[slot]), int(columns.num_known_tokens[slot])
        query_len = min(known - computed, plan.budget.largest_chunk)
        to_copy = blocks.slots_to_copy(np.array([slot]))
        while blocks.num_blocks_missing(slot, computed + query_len) + len(to_copy) > blocks.num_free_blocks:
            last = self._groups.prefilling[-1]
            is_own = last is sequence or (last.group is sequence.group and last.group.uses_beam_search)
            if is_own or any(chunk.sequence is last for chunk in plan.chunks):
                room = int(columns.num_blocks[slot]) + blocks.num_free_blocks - len(to_copy)
                query_len = min(query_len, room * blocks.block_size - computed)
                break
            self._preemption.give_up(last, plan)
            to_copy = blocks.slots_to_copy(to_copy)
        if query_len <= 0 or len(to_copy) > blocks.num_free_blocks:
            return
        if len(to_copy):
            self._copy_on_write(plan, to_copy)
        added = blocks.grow(slot, computed + query_len)
        if is_unknown:
            self._groups.unknown.remove(sequence)
            plan.introduce(Introduction(sequence, computed))
        elif len(added):
            plan.appended.append((np.array([slot]), np.array([len(added)]), added))
        columns.num_computed_tokens[slot] += query_len
        blocks.publish_all_of(slot)
        plan.budget.take_chunk(query_len)
        if computed + query_len < known:
            plan.chunks.append(Chunk(sequence, query_len, 0))
        else:
            self._add_last_chunk(plan, sequence, query_len)

    def _begin(self, sequence: Sequence) -> None:
        """The first look at the prefix cache is at the last moment: prompts of the same step share what they can."""
        num_cached = self._blocks.begin(sequence)
        group = sequence.group
        if sequence is group.sequences[0] and not group.num_preemptions and not group.num_moves:
            group.num_cached_tokens = min(num_cached, group.num_prompt_tokens)

    def _add_last_chunk(self, plan: StepPlan, sequence: Sequence, query_len: int) -> None:
        """The row that draws: for a group that began as one also for those that find a slot, and are forked here."""
        group, columns = sequence.group, self._columns
        columns.num_placeholders[sequence.slot] += 1
        children: list[Sequence] = []
        if group in self._groups.unforked:
            is_introduced = any(introduction.sequence is sequence for introduction in plan.introductions)
            children = self._groups.fork_children(sequence)
            for child in children:
                if is_introduced:
                    self._groups.unknown.remove(child)
                    del self._groups.forks[child]
                    plan.introduce(Introduction(child, 0, same_as=sequence))
                else:  # the worker forks before it appends: the parent's newest blocks are not in what it copies
                    plan.replaced.append(child)
        self._groups.caught_up(sequence)
        num_samples = group.beam_search.num_candidates if group.beam_search else 1 + len(children)
        plan.chunks.append(Chunk(sequence, query_len, num_samples, children))


def _taking_part(slots: Ints, alone: AbstractSet[SequenceGroup] | None, on_trial: AbstractSet[SequenceGroup]) -> Ints:
    """Those of `slots` that have a row; see `RowFiller.add_decodes`."""
    if alone is None and not on_trial:
        return slots
    theirs = [sequence.slot for group in alone or on_trial for sequence in group.unfinished()]
    return slots[np.isin(slots, theirs, invert=alone is None)]
