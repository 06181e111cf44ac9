"""The groups of one worker, who of them has a slot, and what the worker has yet to be told of it.

Mechanism without a decision: `Scheduler` says who comes and goes, this module keeps slots, blocks and queues in step.
A group is in one place at a time:

    running     its sequences have slots; those of `prefilling` have known tokens that are not computed yet
    swapped     computed in host blocks, without slots
    preempted   without slots and blocks, to be computed again
"""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns

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
        self.expanding: set[SequenceGroup] = set()  # running, and may yet take more slots: of beams, or not all seated
        self.unforked: set[SequenceGroup] = set()  # of those: one sequence computes the prompt, the others fork from it
        self.suspects: deque[SequenceGroup] = deque()  # running, and were in a failed step: each runs one step alone
        self.ready_beams: set[SequenceGroup] = set()  # running, ranked, each beam's last token to be computed
        # What the next step tells the worker.
        self.released_slots: set[int] = set()
        self.unknown: set[Sequence] = set()  # have a slot, but the worker was not told of them yet
        self.forks: dict[Sequence, Sequence] = {}  # child: parent; the worker knows the parent's slot only
        self.tenants: list[str] = []  # by the numbers in `columns.tenant`, of which there are few: they are used again
        self._tenant_numbers: dict[str, int] = {}
        self._free_tenant_numbers: list[int] = []
        self.swap_out: BlockPairs = []  # (device, host)
        self.swap_in: BlockPairs = []  # (host, device)
        self.moved: set[SequenceGroup] = set()  # with blocks in swaps or copies of the step that is being filled
        # Slots of groups as they came back: they are nobody's next victim until they have drawn a token.
        self._returned: dict[SequenceGroup, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether any group is here, wherever it is."""
        return bool(self.running or self.swapped or self.preempted)

    def holds(self, group: SequenceGroup) -> bool:
        """In any of the three places."""
        return group in self.running or group in self.preempted or group in self.swapped

    def all(self) -> list[SequenceGroup]:
        """Running groups first, then swapped, then preempted ones."""
        return [*self.running, *self.swapped, *self.preempted]

    @property
    def num_away(self) -> int:
        """Groups that wait to come back."""
        return len(self.swapped) + len(self.preempted)

    # ---- slots ------------------------------------------------------------------------------------------------------

    @property
    def num_slots_left(self) -> int:
        """Slots for groups that have begun: all that are free but those that beams are sure of."""
        if not self.expanding:
            return self.columns.num_free_slots
        return self.columns.num_free_slots - sum(
            self._num_wanted(group) for group in self.expanding if group.uses_beam_search
        )

    @property
    def num_free_slots(self) -> int:
        """Slots that no running group holds or waits for."""
        return max(0, self.columns.num_free_slots - sum(map(self._num_wanted, self.expanding)))

    def num_free_slots_for(self, group: SequenceGroup) -> int:
        """Slots for a group that has not begun: it stands back behind all that have, but those it may overrule."""
        if not self.expanding:
            return self.columns.num_free_slots
        overrules = self.policy.overrules
        ahead = [other for other in self.expanding if other.uses_beam_search or not overrules(group, other)]
        return max(0, self.columns.num_free_slots - sum(map(self._num_wanted, ahead)))

    def _num_wanted(self, group: SequenceGroup) -> int:
        if group.uses_beam_search:
            return group.best_of - self.num_seated(group)
        return len(_unseated(group))

    @staticmethod
    def num_seated(group: SequenceGroup) -> int:
        """How many of the group's sequences have slots."""
        return sum(sequence.slot >= 0 for sequence in group.sequences)

    def next_late(self) -> Sequence | None:
        """Of the groups that have begun, the next sequence, in policy order, that waits for a slot of its own.

        Not while its group is yet to fork, nor while the logprobs of its prompt are on their way: two would tell them.
        """
        late = [
            group
            for group in self.expanding - self.unforked
            if not group.uses_beam_search and not group.awaits_prompt_logprobs
        ]
        return _unseated(min(late, key=self.policy.key))[0] if late else None

    # ---- coming -----------------------------------------------------------------------------------------------------

    @names_group
    def seat(self, group: SequenceGroup, most: int) -> None:
        """Gives a group at most so many slots, and at least `group.num_slots`; the others come as slots come free.

        Of sequences that have nothing but the prompt one gets a slot, and computes it for all. What lies in host blocks
        comes back whole.
        """
        sequences, begins_as_one = group.unfinished(), group.begins_as_one
        swapped = [sequence for sequence in sequences if sequence.status is SequenceStatus.SWAPPED]
        if swapped or group.uses_beam_search:
            seated = swapped or sequences
        else:
            seated = sequences[: 1 if begins_as_one else max(1, most)]
        if begins_as_one and len(seated) == 1:
            self.unforked.add(group)
        self.running.add(group)
        if group.uses_beam_search or len(seated) < len(sequences):
            self.expanding.add(group)
        for sequence in seated:
            self._seat(sequence)
        self.prefilling += seated

    def seat_late(self, sequence: Sequence) -> None:
        """A sequence of a running group gets a slot of its own; its prompt is found where siblings computed it."""
        self._seat(sequence)
        mine = [index for index, other in enumerate(self.prefilling) if other.group is sequence.group]
        self.prefilling.insert(mine[-1] + 1 if mine else len(self.prefilling), sequence)
        self._settle(sequence.group)

    def _seat(self, sequence: Sequence) -> None:
        group = sequence.group
        sequence.attach(self.columns)
        self.columns.is_held[sequence.slot] = group.uses_beam_search
        self.columns.tenant[sequence.slot] = self._tenant_number(group.share)
        self.unknown.add(sequence)

    def _settle(self, group: SequenceGroup) -> None:
        """A group with a slot for each sequence wants no more, unless its beams fork."""
        if group in self.expanding and not group.uses_beam_search and not _unseated(group):
            self.expanding.discard(group)
            self.unforked.discard(group)

    def _tenant_number(self, tenant: str) -> int:
        number = self._tenant_numbers.get(tenant)
        if number is None:
            if not self._free_tenant_numbers and len(self.tenants) >= 2 * self.columns.max_num_seqs:
                self._forget_tenants()
            if self._free_tenant_numbers:
                number = self._free_tenant_numbers.pop()
                self.tenants[number] = tenant
            else:
                number = len(self.tenants)
                self.tenants.append(tenant)
            self._tenant_numbers[tenant] = number
        return number

    def _forget_tenants(self) -> None:
        """Frees the numbers that no slot has: half of them, or more."""
        used = set(self.columns.tenant[self.columns.occupied].tolist())
        self._tenant_numbers = {name: number for name, number in self._tenant_numbers.items() if number in used}
        self._free_tenant_numbers = [number for number in range(len(self.tenants)) if number not in used]

    @names_group
    def bring_back(self, group: SequenceGroup) -> None:
        """Seats a group that was swapped out, or computes it again, safe from being a victim before it got on."""
        self._returned[group] = _num_tokens(group)
        (self.swapped if group in self.swapped else self.preempted).remove(group)
        is_swapped = any(sequence.status is SequenceStatus.SWAPPED for sequence in group.sequences)
        self.seat(group, self.num_slots_left)
        if is_swapped:
            self.swap_in += self.blocks.swap_in(group)
            self.moved.add(group)

    def is_fresh_from_return(self, group: SequenceGroup) -> bool:
        """Whether it has generated nothing since it came back, and so should not give way again."""
        before = self._returned.get(group)
        if before is not None and _num_tokens(group) > before:
            del self._returned[group]
            before = None
        return before is not None

    def caught_up(self, sequence: Sequence) -> None:
        """All known tokens of a sequence are computed by the steps sent so far."""
        self.prefilling.remove(sequence)

    def fork_children(self, parent: Sequence) -> list[Sequence]:
        """Other sequences of a group that began as one take slots, as many as there are, where the parent has got to.

        Who gets none now comes by itself later on.
        """
        children = _unseated(parent.group)[: self.num_slots_left]
        for child in children:
            child.attach_as_child(parent)
            self._share_blocks(parent, child)
        self.unforked.discard(parent.group)
        self._settle(parent.group)
        return children

    def forked_in_vain(self, parent: Sequence, children: list[Sequence]) -> None:
        """The step that forked them failed: the children give their slots up, and the parent's row forks anew."""
        for child in children:
            if child.slot >= 0:
                self.give_up_slot(child, SequenceStatus.WAITING, publishes=False)
        if _unseated(parent.group):
            self.expanding.add(parent.group)
            self.unforked.add(parent.group)

    def fork_beam(self, parent: Sequence, child: Sequence) -> None:
        """A beam's further continuation takes a slot beside it."""
        child.attach_as_child(parent)
        self._share_blocks(parent, child)

    def _share_blocks(self, parent: Sequence, child: Sequence) -> None:
        self.blocks.fork(parent.slot, child.slot)
        self.unknown.add(child)
        self.forks[child] = parent

    # ---- going ------------------------------------------------------------------------------------------------------

    @names_group
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

    def unseat(self, sequence: Sequence) -> None:
        """Takes the slot of one sequence that is half computed; it comes late, and the others of its group go on."""
        self.give_up_slot(sequence, SequenceStatus.PREEMPTED)
        self.expanding.add(sequence.group)

    @names_group
    def swap_out_group(self, group: SequenceGroup) -> None:
        """Moves a running group to host blocks; steps in flight still write the blocks that are copied after them."""
        self.swap_out += self.blocks.swap_out(group)
        self.moved.add(group)
        for sequence in group.sequences:
            if sequence.slot >= 0:
                self.give_up_slot(sequence, SequenceStatus.SWAPPED)
        self._leave(group)
        bisect.insort(self.swapped, group, key=self.policy.key)

    @names_group
    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its blocks are free for the next step."""
        group = sequence.group
        if sequence.slot >= 0:
            self.give_up_slot(sequence, SequenceStatus.FINISHED)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.blocks.free_host(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.drop_pending()
        is_swapped = any(other.status is SequenceStatus.SWAPPED for other in group.sequences)
        if group.is_finished:
            self._leave(group)
        elif (group in self.running and not self.num_seated(group)) or (group in self.swapped and not is_swapped):
            self.recompute_later(group)  # those that are left have nothing computed, nor anybody to fork from
        else:
            self._settle(group)

    @names_group
    def give_up_slot(self, sequence: Sequence, status: SequenceStatus, publishes: bool = True) -> None:
        """Frees slot and blocks; with `publishes` its full blocks can still be found by their content."""
        if publishes:
            self.blocks.publish_all_of(sequence.slot)
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
        groups = sorted(self.all(), key=self.policy.key)
        for group in groups:
            for sequence in group.unfinished():
                if sequence.slot >= 0:
                    sequence.detach(SequenceStatus.WAITING)
                sequence.status = SequenceStatus.WAITING
                sequence.host_table, sequence.num_swapped_tokens = sequence.host_table[:0], 0
                sequence.drop_pending()
        self.running.clear()
        self.suspects.clear()
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
        self.unforked.discard(group)
        self.ready_beams.discard(group)
        self._returned.pop(group, None)
        for groups in (self.swapped, self.preempted, self.suspects):
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
            self.columns.is_held[slot] = sequence.group.uses_beam_search

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError when queues, columns and blocks (see `BlockAllocator`) contradict one another."""
        self.columns.check_integrity()
        self.blocks.check_integrity(set(self.all()), part)
        seated = {s.slot for group in self.running for s in group.unfinished() if s.slot >= 0}
        assert seated == set(np.flatnonzero(self.columns.occupied).tolist()), "running groups and slots disagree"
        places = self.all()
        assert len(places) == len(set(places)), "a group is in two places"
        assert self.expanding <= self.running and self.ready_beams <= self.running, "slots are kept for the absent"
        assert self.num_slots_left >= 0, "beams were promised more slots than there are"
        assert self.unforked <= self.expanding, "a group is to fork that wants no slots"
        assert all(group in self.running for group in self.suspects), "a suspect does not run"
        for group in self.running:
            assert self.num_seated(group), "a group runs without a slot"
            may_expand = group.uses_beam_search or bool(_unseated(group))
            assert (group in self.expanding) == may_expand, "who waits for slots is miscounted"
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


def _unseated(group: SequenceGroup) -> list[Sequence]:
    return [sequence for sequence in group.unfinished() if sequence.slot < 0]


def _num_tokens(group: SequenceGroup) -> int:
    return sum(sequence.num_tokens for sequence in group.unfinished())
