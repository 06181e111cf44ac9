"""Who gives way when blocks run out, and how: by swapping to host blocks, or by computing everything again later."""

from __future__ import annotations

from scheduler_svc.core.preemption_modes import MODES, Costs
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_groups import WorkerGroups


class Preemption:
    """Chooses victims and takes their blocks.

    Args:
        mode: one of MODES; `auto` takes the cheaper way for each victim.
    """

    def __init__(self, groups: WorkerGroups, mode: str, costs: Costs) -> None:
        assert mode in MODES
        self._groups = groups
        self._mode = mode
        self._costs = costs

    def choose_victim(self) -> SequenceGroup:
        """The youngest group that is half computed, else the youngest of all.

        One that has just come back and not got on is passed over while there is another: two groups that do not fit
        together would throw each other out for ever.
        """
        groups = self._groups
        half_computed = {sequence.group for sequence in groups.prefilling}
        for candidates in (half_computed, groups.running):
            settled = [group for group in candidates if not groups.is_fresh_from_return(group)]
            if settled:
                return max(settled, key=groups.policy.key)
        return max(half_computed or groups.running, key=groups.policy.key)

    def preempt(self, group: SequenceGroup) -> bool:
        """Takes a running group's slots and blocks; whether it was swapped out, and need not be computed again."""
        group.num_preemptions += 1
        if self._should_swap(group):
            self._groups.swap_out_group(group)
            return True
        self._groups.recompute_later(group)
        return False

    def start_over_if_stuck(self, plan: StepPlan) -> None:
        """A group that has the whole cache and cannot get on: a flush took what its sequences were yet to share."""
        if plan.has_rows or not self._groups.prefilling or len(self._groups.running) != 1:
            return
        (group,) = self._groups.running
        if self._has_draws_on_the_way(group):
            return  # it gets on with what is on its way
        self._groups.recompute_later(group)
        group.num_preemptions += 1
        plan.num_preempted += 1

    def _has_draws_on_the_way(self, group: SequenceGroup) -> bool:
        placeholders = self._groups.columns.num_placeholders
        return any(placeholders[sequence.slot] for sequence in group.unfinished() if sequence.slot >= 0)

    def give_way(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Of a group that has got further only what is half computed gives way."""
        half_computed = [sequence for sequence in self._groups.prefilling if sequence.group is group]
        if half_computed:
            for sequence in reversed(half_computed):
                self.give_up(sequence, plan)
        else:
            self.preempt_for_step(group, plan)

    def give_up(self, sequence: Sequence, plan: StepPlan) -> None:
        """Takes the blocks of a half-computed sequence: from it alone, where others of its group can do without it."""
        group = sequence.group
        if sequence.slot < 0:
            return  # went with its group
        if group.uses_beam_search or self._groups.num_seated(group) == 1:
            self.preempt_for_step(group, plan)
        else:
            self._groups.unseat(sequence)
            plan.num_preempted += 1

    @names_group
    def preempt_for_step(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Takes the group's slots and blocks and counts that in the plan."""
        plan.num_swapped_out += self.preempt(group)
        plan.num_preempted += 1

    def _should_swap(self, group: SequenceGroup) -> bool:
        """Out of host blocks means computing again, and so does a beam whose answer is yet to come and forks it."""
        blocks = self._groups.blocks
        num_blocks = len(blocks.blocks_held(group))
        if self._mode == "recompute" or not 0 < num_blocks <= blocks.host_allocator.num_free:
            return False
        if group in self._groups.moved:  # its blocks move in this step already
            return False
        seated = [sequence for sequence in group.sequences if sequence.slot >= 0]
        if any(sequence in self._groups.unknown for sequence in seated):
            return False
        if group.uses_beam_search and group not in self._groups.ready_beams:
            return False
        return self._mode == "swap" or self._swaps_faster(group, num_blocks)

    def _swaps_faster(self, group: SequenceGroup, num_blocks: int) -> bool:
        costs = self._costs
        if not costs.swap_bytes_per_s or not costs.prefill_tokens_per_s:
            return False
        there_and_back_s = 2 * num_blocks * costs.block_bytes / costs.swap_bytes_per_s
        block_size = self._groups.blocks.block_size
        num_tokens = min(sum(s.num_computed_tokens for s in group.sequences), num_blocks * block_size)
        return there_and_back_s < num_tokens / costs.prefill_tokens_per_s
