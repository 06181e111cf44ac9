"""Who gives way when blocks run out, and how: by swapping to host blocks, or by computing everything again later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.core.sequence import SequenceGroup
    from scheduler_svc.core.worker_groups import WorkerGroups

MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class Costs:
    """What the worker measured; zeros where it did not, and then `auto` computes again."""

    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0  # one way
    block_bytes: int = 0


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
