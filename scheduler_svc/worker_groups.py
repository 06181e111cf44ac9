"""The groups of one worker, who of them has a slot, and what the worker has yet to be told of it.

Mechanism without a decision: `Scheduler` says who comes and goes, this module keeps slots, blocks and queues in step.
A group is in one place at a time:

    running     its sequences have slots; those of `prefilling` have known tokens that are not computed yet
    swapped     computed in host blocks, without slots
    preempted   without slots and blocks, to be computed again
"""

from __future__ import annotations

import bisect

import numpy as np

from scheduler_svc.block_manager import BlockSpaceManager
from scheduler_svc.policy import Policy
from scheduler_svc.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.sequence_columns import SequenceColumns

BlockPairs = list[tuple[int, int]]


class WorkerGroups:
    """Queues are in policy order where they are lists of groups."""

    def __init__(self, columns: SequenceColumns, blocks: BlockSpaceManager, policy: Policy) -> None:
        self.columns = columns
        self.blocks = blocks
        self.policy = policy
        self.running: set[SequenceGroup] = set()
        self.swapped: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.prefilling: list[Sequence] = []  # in order of their start, sequences of one group together
        self.expanding: set[SequenceGroup] = set()  # running, and may yet take more slots: unforked, or of beams
        self.ready_beams: set[SequenceGroup] = set()  # running, ranked, each beam's last token to be computed
        # What the next step tells the worker.
        self.released_slots: set[int] = set()
        self.unknown: set[Sequence] = set()  # have a slot, but the worker was not told of them yet
        self.forks: dict[Sequence, Sequence] = {}  # child: parent; the worker knows the parent's slot only
        self.tenants: list[str] = []  # by the numbers in `columns.tenant`
        self._tenant_numbers: dict[str, int] = {}
        self.swap_out: BlockPairs = []  # (device, host)
        self.swap_in: BlockPairs = []  # (host, device)
        self.moved: set[SequenceGroup] = set()  # with blocks in swaps or copies of the step that is being filled
        # Slots of groups as they came back: they are nobody's next victim until they have drawn a token.
        self._returned: dict[SequenceGroup, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.swapped or self.preempted)

    @property
    def num_free_slots(self) -> int:
        """Slots that no running group holds or was promised."""
        promised = sum(group.num_slots - self._num_seated(group) for group in self.expanding)
        return self.columns.num_free_slots - promised

    @staticmethod
    def _num_seated(group: SequenceGroup) -> int:
        return sum(sequence.slot >= 0 for sequence in group.sequences)

    # ---- coming -----------------------------------------------------------------------------------------------------

    def seat(self, group: SequenceGroup) -> list[Sequence]:
        """Gives slots to a group; the sequences that have tokens to compute, which are all but children to come."""
        self.running.add(group)
        sequences = group.unfinished()
        if group.begins_as_one or group.uses_beam_search:
            self.expanding.add(group)
        seated = sequences[:1] if group.begins_as_one else sequences
        for sequence in seated:
            sequence.attach(self.columns)
            self.columns.is_held[sequence.slot] = group.uses_beam_search or len(sequences) > 1
            self.columns.tenant[sequence.slot] = self._tenant_number(group.tenant)
            self.unknown.add(sequence)
        self.prefilling += seated
        return seated

    def _tenant_number(self, tenant: str) -> int:
        if tenant not in self._tenant_numbers:
            self._tenant_numbers[tenant] = len(self.tenants)
            self.tenants.append(tenant)
        return self._tenant_numbers[tenant]

    def bring_back(self, group: SequenceGroup) -> None:
        """Seats a group that was swapped out, or computes it again, safe from being a victim before it got on."""
        self._returned[group] = _num_tokens(group)
        (self.swapped if group in self.swapped else self.preempted).remove(group)
        is_swapped = any(sequence.status is SequenceStatus.SWAPPED for sequence in group.sequences)
        self.seat(group)
        if is_swapped:
            self.swap_in += self.blocks.swap_in(group)
            self.moved.add(group)

    def is_fresh_from_return(self, group: SequenceGroup) -> bool:
        before = self._returned.get(group)
        if before is not None and _num_tokens(group) > before:
            del self._returned[group]
            before = None
        return before is not None

    def caught_up(self, sequence: Sequence) -> None:
        """All known tokens of a sequence are computed by the steps sent so far; the last of a group lets all decode."""
        self.prefilling.remove(sequence)
        group = sequence.group
        if not group.uses_beam_search and not any(other.group is group for other in self.prefilling):
            for other in group.unfinished():
                if other.slot >= 0:
                    self.columns.is_held[other.slot] = False

    def fork_children(self, parent: Sequence) -> list[Sequence]:
        """The other sequences of a group that began as one take their slots, where the parent has got to."""
        children = [sequence for sequence in parent.group.unfinished() if sequence is not parent]
        for child in children:
            child.attach_as_child(parent)
            self._share_blocks(parent, child)
        self.expanding.discard(parent.group)
        return children

    def fork_beam(self, parent: Sequence, child: Sequence) -> None:
        """A beam's further continuation takes a slot beside it."""
        child.attach_as_child(parent)
        self._share_blocks(parent, child)

    def _share_blocks(self, parent: Sequence, child: Sequence) -> None:
        self.blocks.fork(parent.slot, child.slot)
        self.unknown.add(child)
        self.forks[child] = parent

    # ---- going ------------------------------------------------------------------------------------------------------

    def recompute_later(self, group: SequenceGroup, publishes: bool = True) -> None:
        """Takes slots and blocks; draws in flight still count when they arrive.

        `publishes`: False where what the group holds is not to be trusted.
        """
        for sequence in group.sequences:
            if sequence.slot >= 0:
                self.give_up_slot(sequence, SequenceStatus.PREEMPTED, publishes)
            elif sequence.status is SequenceStatus.SWAPPED:
                self.blocks.free_host(sequence)
                sequence.status = SequenceStatus.PREEMPTED
        self._leave(group)
        bisect.insort(self.preempted, group, key=self.policy.key)

    def swap_out_group(self, group: SequenceGroup) -> None:
        """Moves a running group to host blocks; steps in flight still write the blocks that are copied after them."""
        self.swap_out += self.blocks.swap_out(group)
        self.moved.add(group)
        for sequence in group.sequences:
            if sequence.slot >= 0:
                self.give_up_slot(sequence, SequenceStatus.SWAPPED)
        self._leave(group)
        bisect.insort(self.swapped, group, key=self.policy.key)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its blocks are free for the next step."""
        group = sequence.group
        if sequence.slot >= 0:
            self.give_up_slot(sequence, SequenceStatus.FINISHED)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.blocks.free_host(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.drop_pending()
        if group.is_finished:
            self._leave(group)
        elif group in self.running and not self._num_seated(group):
            self.recompute_later(group)  # it ended before the prompt was computed that the others are forked from

    def give_up_slot(self, sequence: Sequence, status: SequenceStatus, publishes: bool = True) -> None:
        if publishes:
            self.blocks.publish(np.array([sequence.slot]))
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self.unknown:
            self.unknown.remove(sequence)
            self.forks.pop(sequence, None)
        else:
            self.released_slots.add(sequence.slot)
        self.blocks.free(sequence.slot)
        sequence.detach(status)

    def give_up_all(self) -> list[SequenceGroup]:
        """The worker is lost: its groups, in policy order. Slots and blocks, maybe broken, are not used again."""
        groups = sorted([*self.running, *self.swapped, *self.preempted], key=self.policy.key)
        for group in groups:
            for sequence in group.unfinished():
                if sequence.slot >= 0:
                    sequence.detach(SequenceStatus.WAITING)
                sequence.status = SequenceStatus.WAITING
                sequence.host_table, sequence.num_swapped_tokens = sequence.host_table[:0], 0
                sequence.drop_pending()
        self.running.clear()
        self.swapped.clear()
        self.preempted.clear()
        return groups

    def forget(self, group: SequenceGroup) -> None:
        """Gives up a swapped or preempted group, which waits for another worker or for its end."""
        for sequence in group.unfinished():
            if sequence.status is SequenceStatus.SWAPPED:
                self.blocks.free_host(sequence)
            sequence.status = SequenceStatus.WAITING
        self._leave(group)

    def _leave(self, group: SequenceGroup) -> None:
        """Takes a group out of every queue."""
        self.running.discard(group)
        self.expanding.discard(group)
        self.ready_beams.discard(group)
        self._returned.pop(group, None)
        for groups in (self.swapped, self.preempted):
            if group in groups:
                groups.remove(group)

    def was_told(self, forks: dict[Sequence, Sequence]) -> None:
        """A step was made that carries everything the worker had to be told, `forks` among it."""
        self.unknown -= forks.keys()
        self.forks.clear()
        self.released_slots, self.swap_out, self.swap_in, self.moved = set(), [], [], set()

    def tell_all_again(self) -> None:
        """The next step releases all slots and introduces every sequence anew, whatever the worker had applied."""
        self.released_slots = set(range(self.columns.max_num_seqs))
        running = sorted(self.running, key=self.policy.key)
        self.prefilling = [s for group in running for s in group.unfinished() if s.slot >= 0]
        self.unknown = set(self.prefilling)
        self.forks.clear()
        self.ready_beams.clear()
        for sequence in self.prefilling:
            slot, num_tokens = sequence.slot, sequence.num_tokens
            self.columns.num_known_tokens[slot] = num_tokens
            # A beam that has answered while its siblings had not answers again, from its last token.
            self.columns.num_computed_tokens[slot] = min(self.columns.num_computed_tokens[slot], num_tokens - 1)
            group = sequence.group
            self.columns.is_held[slot] = group.uses_beam_search or len(group.unfinished()) > 1

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError when queues, columns and blocks (see `BlockAllocator`) contradict one another."""
        self.columns.check_integrity()
        self.blocks.check_integrity({*self.running, *self.swapped, *self.preempted}, part)
        seated = {s.slot for group in self.running for s in group.unfinished() if s.slot >= 0}
        assert seated == set(np.flatnonzero(self.columns.occupied).tolist()), "running groups and slots disagree"
        places = [*self.running, *self.swapped, *self.preempted]
        assert len(places) == len(set(places)), "a group is in two places"
        assert self.expanding <= self.running and self.ready_beams <= self.running, "slots are kept for the absent"
        assert self.num_free_slots >= 0, "more slots were promised than there are"
        for sequence in self.prefilling:
            assert sequence.slot in seated, "a prefilling sequence has no slot"
            assert sequence.num_computed_tokens < self.columns.num_known_tokens[sequence.slot], "nothing to prefill"
        for sequence in self.unknown:
            assert sequence.slot in seated, "the worker is to be told of a sequence without a slot"
        for group in [*self.swapped, *self.preempted]:
            assert all(sequence.slot < 0 for sequence in group.sequences), "a preempted group holds a slot"
            assert not group.is_finished, "a finished group waits to come back"
        for group in self.preempted:
            assert all(len(sequence.host_table) == 0 for sequence in group.sequences), "computed again, and swapped"


def _num_tokens(group: SequenceGroup) -> int:
    return sum(sequence.num_tokens for sequence in group.unfinished())
