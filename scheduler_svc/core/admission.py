"""Which groups begin or come back: in the order of the policy, none overtaken, while there are slots and blocks."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from scheduler_svc.core.answers import Answers
from scheduler_svc.core.blocks.block_manager import AllocStatus
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.queues.group_source import GroupSource
from scheduler_svc.core.row_filler import RowFiller
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_groups import WorkerGroups


class Admission:
    """Seats groups that were swapped out or preempted, sequences that found no slot, and new groups.

    Attributes:
        outgrown: groups that need more than this whole cache; whoever asked for a step takes them away.
    """

    def __init__(
        self,
        groups: WorkerGroups,
        settings: SchedulerSettings,
        preemption: Preemption,
        rows: RowFiller,
        answers: Answers,
    ) -> None:
        self.outgrown: list[SequenceGroup] = []
        self._groups = groups
        self._blocks = groups.blocks
        self._settings = settings
        self._policy = settings.policy
        self._preemption = preemption
        self._rows = rows
        self._answers = answers

    def admit(
        self, plan: StepPlan, waiting: GroupSource, now_ns: int, on_trial: AbstractSet[SequenceGroup] = frozenset()
    ) -> None:
        """Starts groups while there is room: those that come back first, in order, none overtaken.

        Then sequences that found no slot when their group began, then new groups. Those `on_trial` get their slots
        here, and their rows in a step of theirs.
        """
        is_swapped_only = not self._settings.enable_chunked_prefill and len(plan.decode_slots) > 0
        while not plan.budget.is_spent:
            group = self._next_group(waiting)
            if group is None or (is_swapped_only and group not in self._groups.swapped):
                return
            if group in self._groups.running:
                if not self._seat_late(plan, on_trial):
                    return
                continue
            status = self.can_admit(group, plan)
            if status is AllocStatus.LATER:
                return
            comes_back = self._groups.holds(group)
            if not comes_back and not self._leaves_room_for_trial(group, waiting):
                return
            if status is AllocStatus.NEVER:
                if not comes_back:
                    return  # another worker's, or the engine's to refuse
                self.outgrown.append(group)
                self._groups.forget(group)
            elif comes_back:
                self._answers.forget(group)
                self._groups.bring_back(group)
                if group not in on_trial:
                    self._rows.add_group(plan, group)
            else:
                self.admit_new(plan, group, waiting, now_ns)

    @names_group
    def admit_new(self, plan: StepPlan, group: SequenceGroup, waiting: GroupSource, now_ns: int) -> None:
        """Takes the group out of `waiting`, gives it slots and blocks, and its first rows to the plan."""
        waiting.remove(group)
        self._start(group, now_ns)
        self._rows.add_group(plan, group)

    def _start(self, group: SequenceGroup, now_ns: int) -> None:
        self._blocks.make_private(group)
        is_first_time = group.first_scheduled_ns is None
        if is_first_time:
            group.first_scheduled_ns = now_ns
        if is_first_time and self._settings.served is not None and self._policy.counts_tokens:
            self._settings.served.charge(group.share, self._num_tokens_to_pay(group))
        self._groups.seat(group, self._groups.num_free_slots_for(group))

    def _num_tokens_to_pay(self, group: SequenceGroup) -> int:
        """Of the prompt, which its sequences share, and of what each brings along behind it: all that is not cached."""
        num_prompt_tokens, sequences = group.num_prompt_tokens, group.unfinished()
        num_tokens = max(0, num_prompt_tokens - self._num_cached(sequences[0]))
        for sequence in sequences:
            if sequence.num_tokens > num_prompt_tokens:
                num_tokens += sequence.num_tokens - max(num_prompt_tokens, self._num_cached(sequence))
        return num_tokens

    @names_group
    def can_admit(self, group: SequenceGroup, plan: StepPlan | None = None) -> AllocStatus:
        """Whether the whole of what is known of a group fits above the watermark, beside what others still lack."""
        blocks = self._blocks
        if group.num_pending_tokens or group in self._groups.moved:
            return AllocStatus.LATER  # draws are on their way, or its blocks: until then nobody may move it either
        is_swapped = group in self._groups.swapped
        if is_swapped:  # what it held, and room for each sequence to get on
            total = len(blocks.host_blocks_held(group)) + len(group.unfinished())
        else:
            total = blocks.num_blocks_of(group)
        if blocks.can_allocate(total, 0, is_idle=True) is AllocStatus.NEVER:
            return AllocStatus.NEVER
        num_free_slots = (
            self._groups.num_slots_left if self._groups.holds(group) else self._groups.num_free_slots_for(group)
        )
        if group.num_slots > num_free_slots:
            return AllocStatus.LATER
        if plan is not None and not self._settings.enable_chunked_prefill:
            sequences = group.unfinished()[: 1 if group.begins_as_one else num_free_slots]
            if not self._fits_whole(sequences, plan):
                return AllocStatus.LATER
        num_blocks = total if is_swapped else blocks.num_blocks_to_take(group)
        return blocks.can_allocate(num_blocks, self._num_reserved(), not self._groups.running)

    def _next_group(self, waiting: GroupSource) -> SequenceGroup | None:
        first, fresh = self.next_held(), waiting.peek()
        if first is None or (fresh is not None and self._policy.overrules(fresh, first)):
            return fresh
        return first

    def next_held(self) -> SequenceGroup | None:
        """Of the groups that are here, the one that comes back next, or gets its next slot.

        Who gave way for the sake of a late sequence does not come back before that one has its slot.
        """
        returning = next(iter(self._groups.swapped or self._groups.preempted), None)
        late = self._groups.next_late() if self._groups.expanding else None
        if late is None or (returning is not None and not self._policy.overrules(late.group, returning)):
            return returning
        return late.group

    def _leaves_room_for_trial(self, group: SequenceGroup, waiting: GroupSource) -> bool:
        """Whether the next group on trial still finds room once a new group has come that is served after it."""
        trial, key = waiting.peek_trial(), self._policy.key
        if trial is None or key(group) < key(trial):
            return True
        blocks = self._blocks
        num_blocks = blocks.num_blocks_to_take(group) + blocks.num_blocks_to_take(trial)
        has_blocks = blocks.can_allocate(num_blocks, self._num_reserved(), not self._groups.running) is AllocStatus.OK
        return has_blocks and group.num_slots + trial.num_slots <= self._groups.num_free_slots_for(group)

    # ---- late sequences ---------------------------------------------------------------------------------------------

    def _seat_late(self, plan: StepPlan, on_trial: AbstractSet[SequenceGroup]) -> bool:
        """Gives the next late sequence a slot, if there is one and blocks for its tokens."""
        sequence = self._groups.next_late()
        if sequence is None or not self._can_seat(sequence):
            return False
        if not self._settings.enable_chunked_prefill and not self._fits_whole([sequence], plan):
            return False
        self._groups.seat_late(sequence)
        if sequence.group not in on_trial:
            self._rows.add_chunk(plan, sequence)
        return True

    def _can_seat(self, sequence: Sequence) -> bool:
        if self._groups.num_slots_left < 1:
            return False
        blocks = self._blocks
        num_blocks = blocks.num_blocks_for(sequence.num_tokens) - blocks.allocator.num_in_use(blocks.find(sequence))
        return blocks.can_allocate(num_blocks, self._num_reserved(), is_idle=False) is AllocStatus.OK

    def _num_reserved(self) -> int:
        """Blocks that prompts which have begun still lack."""
        missing, known = self._blocks.num_blocks_missing, self._groups.columns.num_known_tokens
        return sum(missing(sequence.slot, int(known[sequence.slot])) for sequence in self._groups.prefilling)

    def _fits_whole(self, sequences: list[Sequence], plan: StepPlan) -> bool:
        """Without chunked prefill: a prompt waits for a step that takes all of it.

        What was generated may have made a group longer than any step; that one is computed in parts.
        """
        num_tokens = sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in sequences)
        num_tokens -= self._num_cached(sequences[0])
        return num_tokens <= plan.budget.tokens_left or not plan.chunks

    def _num_cached(self, sequence: Sequence) -> int:
        return len(self._blocks.find(sequence)) * self._blocks.block_size

    # ---- more urgent groups -----------------------------------------------------------------------------------------

    def make_way(self, plan: StepPlan, waiting: GroupSource) -> None:
        """Preempts running groups for the sake of a waiting one that the policy lets overrule them."""
        if not self._policy.preempts:
            return
        for group in (waiting.peek(), waiting.peek_trial()):
            if group is None:
                continue
            while (overruled := self._overruled(group)) and self.can_admit(group) is AllocStatus.LATER:
                if not self._may_fit_without(overruled, group):
                    break
                self._overrule(group, plan)
        late = self._groups.next_late() if self._groups.expanding else None
        if late is not None:
            while self._overruled(late.group) and not self._can_seat(late):
                self._overrule(late.group, plan)

    def _may_fit_without(self, others: list[SequenceGroup], group: SequenceGroup) -> bool:
        """Whether a group that waits may find slots and blocks once these have given way: they would for nothing where
        the rest is held by groups that stay. What they share with those counts as theirs."""
        slots = [sequence.slot for other in others for sequence in other.sequences if sequence.slot >= 0]
        num_blocks = self._blocks.num_free_blocks + int(self._groups.columns.num_blocks[slots].sum())
        num_slots = self._groups.num_free_slots_for(group) + len(slots)
        return group.num_slots <= num_slots and self._blocks.num_blocks_to_take(group) <= num_blocks

    def _overruled(self, group: SequenceGroup) -> list[SequenceGroup]:
        return [other for other in self._groups.running if self._policy.overrules(group, other)]

    def _overrule(self, group: SequenceGroup, plan: StepPlan) -> None:
        victim = max(self._overruled(group), key=self._policy.key)
        plan.num_swapped_out += self._preemption.preempt(victim)
        plan.num_overruled += 1
