"""Decides what one worker computes in its next step: continuous batching under a budget of tokens and sequences.

There are no phases: a sequence's computed tokens catch up with its tokens, whether they are a prompt, a chunk of one, a
recomputation after preemption or the last draw. Decodes come first, then prompts that are half computed, then groups
that come back, swapped ones before the others, then new ones. Without chunked prefill a step computes whole prompts or
decodes, and prompts go first. Knows nothing of clocks (time is passed in), sockets, text or the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from scheduler_svc.core.answers import Answers
from scheduler_svc.core.block_manager import AllocStatus, BlockSpaceManager
from scheduler_svc.core.group_fault import names_group
from scheduler_svc.core.policy import POLICIES, Policy
from scheduler_svc.core.preemption import Costs, Preemption
from scheduler_svc.core.prompt_delay import PromptDelay
from scheduler_svc.core.recovery import Recovery
from scheduler_svc.core.sealed_step import seal
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequence_columns import Ints, SequenceColumns
from scheduler_svc.core.served_tokens import ServedTokens
from scheduler_svc.core.step_plan import (
    Answer,
    Chunk,
    Introduction,
    NewTokens,
    ScheduledRows,
    SchedulerOutputs,
    SchedulingBudget,
    StepPlan,
)
from scheduler_svc.core.worker_groups import WorkerGroups

MAX_INTRODUCED_BYTES = 20 << 20  # of full metadata in one step: a third of the message limit
MAX_ON_TRIAL = 8  # groups at once that lost a worker under them once; who lost two is tried alone


class Source(Protocol):
    """Where new groups come from: its queue, or what it is shown of that."""

    def peek(self) -> SequenceGroup | None: ...

    def peek_trial(self) -> SequenceGroup | None:
        """The first of those that are on trial, which `peek` does not show."""

    def remove(self, group: SequenceGroup) -> object: ...

    def earliest_arrival_ns(self) -> int | None: ...


@dataclass(frozen=True)
class SchedulerSettings:
    """How one worker's scheduler decides.

    Attributes:
        policy: order of groups; the last in it is preempted first.
        enable_chunked_prefill: False computes whole prompts, in steps of their own, before decodes.
        delay_factor: without chunked prefill, see `PromptDelay`.
        preemption_mode, costs: see `Preemption`.
        served: charged with what tenants are served, where the policy counts tokens.
    """

    policy: Policy = POLICIES["fcfs"]
    enable_chunked_prefill: bool = True
    delay_factor: float = 0.0
    preemption_mode: str = "auto"
    costs: Costs = field(default_factory=Costs)
    served: ServedTokens | None = None


class Scheduler:
    """The running, swapped and preempted groups of one worker.

    Args:
        columns, blocks: the worker's slots and cache.
        max_num_batched_tokens: tokens that one step computes at most.

    Attributes:
        outgrown: groups that need more than this whole cache; whoever asked for a step takes them away.
        tells_releases: the next step is made even where it only says which slots were given up.
        on_trial: groups that a worker was lost under. Until they have got past where they were then they have steps
            to themselves, so that a group which costs every worker that runs it takes few others with it: every second
            step, where others have something to do.
    """

    def __init__(
        self,
        columns: SequenceColumns,
        blocks: BlockSpaceManager,
        max_num_batched_tokens: int,
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self.columns = columns
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.groups = WorkerGroups(columns, blocks, self.settings.policy)
        self.suspects: deque[SequenceGroup] = deque()  # were in a failed step: each runs one step alone
        self.outgrown: list[SequenceGroup] = []
        self.tells_releases = False
        self.on_trial: set[SequenceGroup] = set()
        self._was_trial = False  # the last step was theirs
        self._has_step: AbstractSet[SequenceGroup] | None = None  # see `_alone`, of the step that was decided last
        self._preemption = Preemption(self.groups, self.settings.preemption_mode, self.settings.costs)
        self._answers = Answers(self.groups, self.settings.served if self.settings.policy.counts_tokens else None)
        self._recovery = Recovery(self.groups)
        self._delay = PromptDelay(self.settings.delay_factor)

    @property
    def running(self) -> set[SequenceGroup]:
        return self.groups.running

    @property
    def swapped(self) -> list[SequenceGroup]:
        return self.groups.swapped

    @property
    def preempted(self) -> list[SequenceGroup]:
        return self.groups.preempted

    def holds(self, group: SequenceGroup) -> bool:
        return group in self.running or group in self.preempted or group in self.swapped

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens of all groups here: what attention reads, and what has to be computed when it is lost."""
        waiting = (*self.swapped, *self.preempted)
        held = int(self.columns.num_tokens[self.columns.occupied].sum())
        return held + sum(sequence.num_tokens for group in waiting for sequence in group.unfinished())

    def can_ever_run(self, group: SequenceGroup) -> bool:
        """Whether this worker, empty, could hold what there is of the group, and every length that it may reach."""
        num_blocks = self.blocks.allocator.num_blocks
        return (
            group.max_num_tokens <= self.columns.max_model_len
            and group.num_prompt_tokens <= num_blocks * self.blocks.block_size  # quick to say, of all that wait
            and group.num_slots <= self.columns.max_num_seqs
            and self.blocks.num_blocks_of(group) <= num_blocks
        )

    # ---- deciding a step --------------------------------------------------------------------------------------------

    def schedule(self, waiting: Source, now_ns: int, is_quiet: bool = True) -> SchedulerOutputs | None:
        """Fills one step; None when there is nothing to send (what was released then waits for the next step).

        `is_quiet`: nothing is in flight, so groups may be put on trial, and who cannot get on will not by waiting.
        """
        plan = StepPlan(SchedulingBudget(self.max_num_batched_tokens, self.columns.max_num_seqs))
        alone = self._has_step = self._alone(waiting)
        if alone is None:
            self._make_way(plan, waiting)
            if is_quiet and self.has_candidate_for_trial(waiting):
                self._has_step = self.on_trial
                self._try(plan, waiting, now_ns)
                alone = self.on_trial
        if not self.settings.enable_chunked_prefill and alone is None and self._may_start_prompts(waiting, now_ns):
            self._admit(plan, waiting, now_ns)
        is_of_prompts = bool(plan.chunks)
        if not is_of_prompts:
            self._add_decodes(plan, alone)
            self._add_chunks(plan, alone)
            if alone is not None and is_quiet and not plan.has_rows:
                self._make_way_for(plan, alone)
                alone = alone if plan.has_rows else None  # None: they had to give way themselves, and others go on
            if alone is not None or not self.on_trial:
                self._start_over_if_stuck(plan)
            # What was taken from one group is not given to another at once, unless nobody is left to have it.
            may_admit = alone is None and not (plan.num_preempted and self.running)
            if may_admit and (self.settings.enable_chunked_prefill or self.swapped or not self.running):
                self._admit(plan, waiting, now_ns)
            if alone is None and is_quiet and not plan.has_rows and (self.on_trial or self._could_try(waiting)):
                alone = self._has_step = self.on_trial  # nobody else can get on
                self._try_after_all(plan, waiting, now_ns)
        if not (plan.has_rows or self.groups.swap_out or self.groups.swap_in or self.tells_releases):
            return None
        self.tells_releases = False
        if plan.has_rows:
            self._was_trial = bool(self.on_trial) and alone is self.on_trial
        outputs = seal(plan, self.groups)
        if is_of_prompts and outputs is not None:
            self._delay.sent(outputs.rows, now_ns)
        return outputs

    def _alone(self, waiting: Source) -> AbstractSet[SequenceGroup] | None:
        """Who has this step to itself: a group of a failed step, or those on trial; None: all who are not on trial."""
        self._forget_trials_over()
        if self.suspects:
            return {self.suspects[0]}
        if self.on_trial and not (self._was_trial and self._others_have_work(waiting)):
            return self.on_trial
        return None

    def _forget_trials_over(self) -> None:
        """Who has passed, ended or given way is on trial no more; who gave way is tried again when it comes back."""
        if self.on_trial:
            self.on_trial = {group for group in self.on_trial & self.running if group.is_on_trial}

    def _others_have_work(self, waiting: Source) -> bool:
        """Whether somebody who is not on trial has something to do: a step is theirs after one of trials."""
        is_here = len(self.running) > len(self.on_trial) or self.swapped or self.preempted
        return bool(is_here) or waiting.peek() is not None

    def groups_at_work(self) -> set[SequenceGroup]:
        """Of whom a step is being made, besides those who wait: a fault over it may be that of any of them."""
        if self._has_step is not None:
            return set(self._has_step)
        return {*self.running, *self.swapped[:1], *self.preempted[:1]}

    def _may_start_prompts(self, waiting: Source, now_ns: int) -> bool:
        """Without chunked prefill: whether a step of prompts comes now, before decodes go on."""
        groups = self.groups
        self._delay.look(now_ns)
        if groups.prefilling or groups.swapped:
            return False  # decodes have to make room, or a prompt that no step can hold is being computed in parts
        earliest_ns = waiting.earliest_arrival_ns()
        if not groups.running or groups.preempted or earliest_ns is None:
            return True
        return self._delay.is_over(earliest_ns, now_ns)

    # ---- decodes ----------------------------------------------------------------------------------------------------

    def _add_decodes(self, plan: StepPlan, alone: AbstractSet[SequenceGroup] | None) -> None:
        """Gives every decode its next position; preempts while there are fewer free blocks than they need."""
        columns, blocks = self.columns, self.blocks
        slots = columns.decodable_slots()
        num_decodes = len(slots)
        if self.groups.ready_beams:
            slots = np.append(slots, self._ready_beam_slots())
        if alone is not None or self.on_trial:
            theirs = [sequence.slot for group in alone or self.on_trial for sequence in group.unfinished()]
            takes_part = np.isin(slots, theirs, invert=alone is None)
            num_decodes = int(takes_part[:num_decodes].sum())
            slots = slots[takes_part]
        at_border, to_copy = blocks.slots_at_border(slots), blocks.slots_to_copy(slots)
        while len(at_border) + len(to_copy) > blocks.num_free_blocks:
            self._give_way(self._preemption.choose_victim(), plan)
            num_decodes = int(columns.occupied[slots[:num_decodes]].sum())
            slots = slots[columns.occupied[slots]]
            at_border, to_copy = blocks.slots_at_border(slots), blocks.slots_to_copy(slots)
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
            self.groups.ready_beams.difference_update(beam.group for beam in plan.beams)
        plan.budget.take(len(slots), len(slots))

    def _ready_beam_slots(self) -> Ints:
        groups = self.groups.ready_beams
        return np.array([sequence.slot for group in groups for sequence in group.unfinished()], np.int64)

    def _copy_on_write(self, plan: StepPlan, slots: Ints) -> None:
        plan.copies += self.blocks.copy_on_write(slots)
        owners = self.columns.owner[slots]
        plan.replaced += [owner for owner in owners if owner not in self.groups.unknown or owner in self.groups.forks]
        self.groups.moved.update(owner.group for owner in owners)

    # ---- chunks -----------------------------------------------------------------------------------------------------

    def _add_chunks(self, plan: StepPlan, alone: AbstractSet[SequenceGroup] | None) -> None:
        """Continues prompts that have begun, oldest first, as far as the budget reaches."""
        for sequence in list(self.groups.prefilling):
            if plan.budget.is_spent:
                return
            takes_part = sequence.group not in self.on_trial if alone is None else sequence.group in alone
            if sequence.slot >= 0 and takes_part:
                self._add_chunk(plan, sequence)

    @names_group
    def _add_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Computes as many known tokens of a sequence as budget and blocks allow, maybe none.

        Takes blocks only from sequences that began later, which have no row in this step yet: the oldest always gets
        on, so half-computed prompts cannot block each other, and decodes give blocks back when they end.
        """
        columns, blocks, slot = self.columns, self.blocks, sequence.slot
        is_unknown = sequence in self.groups.unknown
        if is_unknown and 0 < plan.introduced_bytes > MAX_INTRODUCED_BYTES - sequence.introduction_bytes:
            return
        if is_unknown and not columns.num_blocks[slot]:
            self._begin(sequence)
        computed, known = int(columns.num_computed_tokens[slot]), int(columns.num_known_tokens[slot])
        query_len = min(known - computed, plan.budget.tokens_left)
        to_copy = blocks.slots_to_copy(np.array([slot]))
        while blocks.num_blocks_missing(slot, computed + query_len) + len(to_copy) > blocks.num_free_blocks:
            last = self.groups.prefilling[-1]
            is_own = last is sequence or (last.group is sequence.group and last.group.uses_beam_search)
            if is_own or any(chunk.sequence is last for chunk in plan.chunks):
                room = int(columns.num_blocks[slot]) + blocks.num_free_blocks - len(to_copy)
                query_len = min(query_len, room * blocks.block_size - computed)
                break
            self._give_up(last, plan)
            to_copy = blocks.slots_to_copy(to_copy)
        if query_len <= 0 or len(to_copy) > blocks.num_free_blocks:
            return
        if len(to_copy):
            self._copy_on_write(plan, to_copy)
        added = blocks.grow(slot, computed + query_len)
        if is_unknown:
            self.groups.unknown.remove(sequence)
            plan.introduce(Introduction(sequence, computed))
        elif len(added):
            plan.appended.append((np.array([slot]), np.array([len(added)]), added))
        columns.num_computed_tokens[slot] += query_len
        blocks.publish_all_of(slot)
        plan.budget.take(query_len)
        if computed + query_len < known:
            plan.chunks.append(Chunk(sequence, query_len, 0))
        else:
            self._add_last_chunk(plan, sequence, query_len)

    def _begin(self, sequence: Sequence) -> None:
        """The first look at the prefix cache is at the last moment: prompts of the same step share what they can."""
        num_cached = self.blocks.begin(sequence)
        group = sequence.group
        if sequence is group.sequences[0] and not group.num_preemptions and not group.num_moves:
            group.num_cached_tokens = min(num_cached, group.num_prompt_tokens)

    def _add_last_chunk(self, plan: StepPlan, sequence: Sequence, query_len: int) -> None:
        """The row that draws: for a group that began as one also for those that find a slot, and are forked here."""
        group, columns = sequence.group, self.columns
        columns.num_placeholders[sequence.slot] += 1
        children: list[Sequence] = []
        if group in self.groups.unforked:
            is_introduced = any(introduction.sequence is sequence for introduction in plan.introductions)
            children = self.groups.fork_children(sequence)
            for child in children:
                if is_introduced:
                    self.groups.unknown.remove(child)
                    del self.groups.forks[child]
                    plan.introduce(Introduction(child, 0, same_as=sequence))
                else:  # the worker forks before it appends: the parent's newest blocks are not in what it copies
                    plan.replaced.append(child)
        self.groups.caught_up(sequence)
        num_samples = group.beam_search.num_candidates if group.beam_search else 1 + len(children)
        plan.chunks.append(Chunk(sequence, query_len, num_samples, children))

    # ---- admission --------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, waiting: Source, now_ns: int) -> None:
        """Starts groups while there is room: those that come back first, in order, none overtaken.

        Then sequences that found no slot when their group began, then new groups.
        """
        is_swapped_only = not self.settings.enable_chunked_prefill and len(plan.decode_slots) > 0
        while not plan.budget.is_spent:
            group = self._next_group(waiting)
            if group is None or (is_swapped_only and group not in self.swapped):
                return
            if group in self.running:
                if not self._seat_late(plan):
                    return
                continue
            status = self.can_admit(group, plan)
            if status is AllocStatus.LATER:
                return
            comes_back = self.holds(group)
            if not comes_back and not self._leaves_room_for_trial(group, waiting):
                return
            if status is AllocStatus.NEVER:
                if not comes_back:
                    return  # another worker's, or the engine's to refuse
                self.outgrown.append(group)
                self.groups.forget(group)
            elif comes_back:
                self._answers.forget(group)
                self.groups.bring_back(group)
                self._add_group(plan, group)
            else:
                self._admit_new(plan, group, waiting, now_ns)

    def _seat_late(self, plan: StepPlan) -> bool:
        """Gives the next late sequence a slot, if there is one and blocks for its tokens."""
        sequence = self.groups.next_late()
        if sequence is None or not self._can_seat(sequence):
            return False
        if not self.settings.enable_chunked_prefill and not self._fits_whole([sequence], plan):
            return False
        self.groups.seat_late(sequence)
        self._add_chunk(plan, sequence)
        return True

    def _can_seat(self, sequence: Sequence) -> bool:
        if self.groups.num_slots_left < 1:
            return False
        blocks = self.blocks
        num_blocks = blocks.num_blocks_for(sequence.num_tokens) - blocks.allocator.num_in_use(blocks.find(sequence))
        return blocks.can_allocate(num_blocks, self._num_reserved(), is_idle=False) is AllocStatus.OK

    def _num_reserved(self) -> int:
        """Blocks that prompts which have begun still lack."""
        missing, known = self.blocks.num_blocks_missing, self.columns.num_known_tokens
        return sum(missing(sequence.slot, int(known[sequence.slot])) for sequence in self.groups.prefilling)

    @names_group
    def _admit_new(self, plan: StepPlan, group: SequenceGroup, waiting: Source, now_ns: int) -> None:
        waiting.remove(group)
        self._start(group, now_ns)
        self._add_group(plan, group)

    def has_candidate_for_trial(self, waiting: Source) -> bool:
        """Whether a group waits that has lost a worker, and is to be tried now: it is the turn of trials."""
        if waiting.peek_trial() is None or (self._was_trial and self._others_have_work(waiting)):
            return False
        return self._could_try(waiting)

    def _could_try(self, waiting: Source) -> bool:
        """Whether there is room for the next group on trial, and nobody comes back before it."""
        group, first = waiting.peek_trial(), self._next_held()
        if group is None or (first is not None and not self.settings.policy.overrules(group, first)):
            return False
        return self.can_admit(group) is AllocStatus.OK

    def _leaves_room_for_trial(self, group: SequenceGroup, waiting: Source) -> bool:
        """Whether the next group on trial still finds room once a new group has come that is served after it."""
        trial, key = waiting.peek_trial(), self.settings.policy.key
        if trial is None or key(group) < key(trial):
            return True
        blocks = self.blocks
        num_blocks = blocks.num_blocks_to_take(group) + blocks.num_blocks_to_take(trial)
        has_blocks = blocks.can_allocate(num_blocks, self._num_reserved(), not self.running) is AllocStatus.OK
        return has_blocks and group.num_slots + trial.num_slots <= self.groups.num_free_slots_for(group)

    def _try(self, plan: StepPlan, waiting: Source, now_ns: int) -> None:
        """Puts the next groups on trial: one that lost two workers alone, otherwise a few together."""
        while not plan.budget.is_spent and len(self.on_trial) < MAX_ON_TRIAL and self._could_try(waiting):
            group = waiting.peek_trial()
            assert group is not None, "a candidate comes from there"
            if group.num_worker_losses > 1 and self.on_trial:
                return
            self.on_trial.add(group)  # before a fault can come of it
            self._admit_new(plan, group, waiting, now_ns)
            if group.num_worker_losses > 1:
                return

    def _try_after_all(self, plan: StepPlan, waiting: Source, now_ns: int) -> None:
        """It is not the turn of those on trial, but nobody else can get on."""
        self._forget_trials_over()  # they may have had to give way in this very step
        if not self.on_trial:
            self._try(plan, waiting, now_ns)
            return
        self._add_decodes(plan, self.on_trial)
        self._add_chunks(plan, self.on_trial)
        if not plan.has_rows:
            self._make_way_for(plan, self.on_trial)
            self._start_over_if_stuck(plan)
            self._admit(plan, waiting, now_ns)

    def _next_held(self) -> SequenceGroup | None:
        """Of the groups that are here, the one that comes back next, or gets its next slot.

        Who gave way for the sake of a late sequence does not come back before that one has its slot.
        """
        returning = next(iter(self.swapped or self.preempted), None)
        late = self.groups.next_late() if self.groups.expanding else None
        if late is None or (returning is not None and not self.settings.policy.overrules(late.group, returning)):
            return returning
        return late.group

    def _next_group(self, waiting: Source) -> SequenceGroup | None:
        first, fresh = self._next_held(), waiting.peek()
        if first is None or (fresh is not None and self.settings.policy.overrules(fresh, first)):
            return fresh
        return first

    def _start(self, group: SequenceGroup, now_ns: int) -> None:
        self.blocks.make_private(group)
        is_first_time = group.first_scheduled_ns is None
        if is_first_time:
            group.first_scheduled_ns = now_ns
        if is_first_time and self.settings.served is not None and self.settings.policy.counts_tokens:
            num_cached = len(self.blocks.find(group.sequences[0])) * self.blocks.block_size
            self.settings.served.charge(group.share, max(0, group.num_prompt_tokens - num_cached))
        self.groups.seat(group, self.groups.num_free_slots_for(group))

    def _add_group(self, plan: StepPlan, group: SequenceGroup) -> None:
        for sequence in [sequence for sequence in self.groups.prefilling if sequence.group is group]:
            if plan.budget.is_spent:
                return
            if sequence.slot >= 0:  # else it gave way to one before it
                self._add_chunk(plan, sequence)

    @names_group
    def can_admit(self, group: SequenceGroup, plan: StepPlan | None = None) -> AllocStatus:
        """Whether the whole of what is known of a group fits above the watermark, beside what others still lack."""
        blocks = self.blocks
        if group.num_pending_tokens or group in self.groups.moved:
            return AllocStatus.LATER  # draws are on their way, or its blocks: until then nobody may move it either
        is_swapped = group in self.swapped
        if is_swapped:  # what it held, and room for each sequence to get on
            total = len(blocks.host_blocks_held(group)) + len(group.unfinished())
        else:
            total = blocks.num_blocks_of(group)
        if blocks.can_allocate(total, 0, is_idle=True) is AllocStatus.NEVER:
            return AllocStatus.NEVER
        num_free_slots = self.groups.num_slots_left if self.holds(group) else self.groups.num_free_slots_for(group)
        if group.num_slots > num_free_slots:
            return AllocStatus.LATER
        if plan is not None and not self.settings.enable_chunked_prefill:
            sequences = group.unfinished()[: 1 if group.begins_as_one else num_free_slots]
            if not self._fits_whole(sequences, plan):
                return AllocStatus.LATER
        num_blocks = total if is_swapped else blocks.num_blocks_to_take(group)
        return blocks.can_allocate(num_blocks, self._num_reserved(), not self.running)

    def _fits_whole(self, sequences: list[Sequence], plan: StepPlan) -> bool:
        """Without chunked prefill: a prompt waits for a step that takes all of it.

        What was generated may have made a group longer than any step; that one is computed in parts.
        """
        cached = len(self.blocks.find(sequences[0])) * self.blocks.block_size
        num_tokens = sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in sequences) - cached
        return num_tokens <= plan.budget.tokens_left or not plan.chunks

    def _make_way(self, plan: StepPlan, waiting: Source) -> None:
        """Preempts running groups for the sake of a waiting one that the policy lets overrule them."""
        if not self.settings.policy.preempts:
            return
        for group in (waiting.peek(), waiting.peek_trial()):
            if group is None:
                continue
            while self._overruled(group) and self.can_admit(group) is AllocStatus.LATER:
                self._overrule(group, plan)
        late = self.groups.next_late() if self.groups.expanding else None
        if late is not None:
            while self._overruled(late.group) and not self._can_seat(late):
                self._overrule(late.group, plan)

    def _overruled(self, group: SequenceGroup) -> list[SequenceGroup]:
        return [other for other in self.running if self.settings.policy.overrules(group, other)]

    def _overrule(self, group: SequenceGroup, plan: StepPlan) -> None:
        victim = max(self._overruled(group), key=self.settings.policy.key)
        plan.num_swapped_out += self._preemption.preempt(victim)
        plan.num_overruled += 1

    def _make_way_for(self, plan: StepPlan, alone: AbstractSet[SequenceGroup]) -> None:
        """Whoever pauses for the groups that run alone holds blocks, too: the last in order give theirs up."""
        while not plan.has_rows and self.running & alone and (others := self.running - alone):
            self._preempt(max(others, key=self.settings.policy.key), plan)
            self._add_chunks(plan, alone)
        if not plan.has_rows:
            self.on_trial.clear()
            self._add_decodes(plan, None)
            self._add_chunks(plan, None)

    def _start_over_if_stuck(self, plan: StepPlan) -> None:
        """A group that has the whole cache and cannot get on: a flush took what its sequences were yet to share."""
        if plan.has_rows or not self.groups.prefilling or len(self.running) != 1:
            return
        (group,) = self.running
        self.groups.recompute_later(group)
        group.num_preemptions += 1
        self._count_preempted(group, plan)

    def _give_way(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Of a group that has got further only what is half computed gives way."""
        half_computed = [sequence for sequence in self.groups.prefilling if sequence.group is group]
        if half_computed:
            for sequence in reversed(half_computed):
                self._give_up(sequence, plan)
        else:
            self._preempt(group, plan)

    def _give_up(self, sequence: Sequence, plan: StepPlan) -> None:
        """Takes the blocks of a half-computed sequence: from it alone, where others of its group can do without it."""
        group = sequence.group
        if sequence.slot < 0:
            return  # went with its group
        if group.uses_beam_search or self.groups.num_seated(group) == 1:
            self._preempt(group, plan)
        else:
            self.groups.unseat(sequence)
            plan.num_preempted += 1

    @names_group
    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        plan.num_swapped_out += self._preemption.preempt(group)
        self._count_preempted(group, plan)

    def _count_preempted(self, group: SequenceGroup, plan: StepPlan) -> None:
        plan.num_preempted += 1
        if group in self.suspects:
            self.suspects.remove(group)

    # ---- groups that may go elsewhere -------------------------------------------------------------------------------

    def releasable(self) -> list[SequenceGroup]:
        """Groups that wait to come back, in order, but those with draws or blocks on the way."""
        returning = (*self.swapped, *self.preempted)
        return [group for group in returning if not (group.num_pending_tokens or group in self.groups.moved)]

    def release(self, group: SequenceGroup) -> None:
        """Gives up a group of `releasable`, which goes on at another worker: what was computed of it here is left."""
        self._answers.forget(group)
        self.groups.forget(group)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def process_outputs(self, rows: ScheduledRows, answer: Answer) -> NewTokens:
        """Appends the tokens of an answer, and ends sequences that are complete.

        Raises WrongAnswer, with nothing changed, for an answer that does not fit the rows.
        """
        tokens = self._answers.process(rows, answer)
        self._delay.ended(rows)
        if self.suspects and (self.suspects[0].is_finished or self.suspects[0] in _groups_of(rows)):
            self.suspects.popleft()
        return tokens

    @names_group
    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its blocks are free for the next step."""
        self.groups.finish(sequence)
        group = sequence.group
        if group.is_finished:
            self._answers.forget(group)
        if group in self.suspects and group not in self.running:
            self.suspects.remove(group)

    def abort(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished():
            self.finish(sequence)

    # ---- failure ----------------------------------------------------------------------------------------------------

    def roll_back(self, failed: ScheduledRows, skipped: Iterable[ScheduledRows] = ()) -> None:
        """Starts over after a step that failed; those in flight behind it will be skipped, and their tokens not come.

        The groups of the failed step become suspects. Nothing may be scheduled before the skipped steps are answered.
        """
        steps = [failed, *skipped]
        self._recovery.roll_back(steps)
        for rows in steps:
            self._delay.ended(rows)
        for group in self.running:
            self._answers.forget(group)
        groups = (group for group in _groups_of(failed) if group in self.running)
        self.suspects = deque(sorted(groups, key=self.settings.policy.key))

    def take_back(self, rows: ScheduledRows) -> None:
        """Starts over before a step that was never sent; nothing is in flight."""
        suspects = self.suspects
        self.roll_back(rows)
        self.suspects = deque(group for group in suspects if group in self.running)

    def evacuate(self) -> list[SequenceGroup]:
        """The worker is lost: all unfinished groups, in policy order, ready to wait for another one."""
        return self._recovery.evacuate()

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError when queues, columns and blocks (see `BlockAllocator`) contradict one another."""
        self.groups.check_integrity(part)
        assert all(group in self.running for group in self.suspects), "a suspect does not run"


def _groups_of(rows: ScheduledRows) -> set[SequenceGroup]:
    return {sequence.group for sequence in rows.sequences}
