"""Back to the last good answer after a step failed, and away from a worker that is lost.

The failed step and those in flight behind it, which the worker will skip, are taken back in one go: nobody ever sees
columns that count tokens as computed which no step in flight computes. So what is published, at any other moment, is of
an answered step, or of one in flight whose failure withdraws it. Nothing is taken for granted that a step which failed,
or is skipped, should have moved or computed for others:

    computed tokens, draws    are taken back
    blocks published          are withdrawn from the prefix cache; whoever had found them begins anew
    swaps and copies          did not happen: the groups concerned are computed again
    forks                     are undone: the children wait for the parent's row to come again
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import ScheduledRows
from scheduler_svc.core.worker_groups import WorkerGroups


class Recovery:
    """Takes back what steps that failed were to do."""

    def __init__(self, groups: WorkerGroups) -> None:
        self._groups = groups
        self._moved: set[SequenceGroup] = set()
        self._wrong: list[int] = []  # blocks that do not hold what they were to hold

    def roll_back(self, steps: list[ScheduledRows]) -> None:
        """Takes back the rows of all steps in flight, the failed one first, and starts over.

        Their tokens will not come. The next step releases all slots, and each running sequence is introduced anew, its
        cached tokens included, so nothing has to be known of what the worker still applied.
        """
        for rows in steps:
            self._take_back(rows)
        self._start_over()

    def _take_back(self, rows: ScheduledRows) -> None:
        columns = self._groups.columns
        is_current = columns.generation[rows.slots] == rows.generations
        columns.num_computed_tokens[rows.slots[is_current]] -= rows.query_lens[is_current]
        first_beam = len(rows) - rows.num_beam_rows
        self._drop_draws(rows.sample_slots, rows.sample_generations, rows.sample_sequences)
        self._drop_draws(rows.slots[first_beam:], rows.generations[first_beam:], rows.sequences[first_beam:])
        for parent, children in rows.forks:
            if parent.slot >= 0:
                self._groups.forked_in_vain(parent, children)
            else:
                self._moved.add(parent.group)  # the parent ended meanwhile: no row of it comes that forks the others
        self._moved |= rows.moved
        wrong = [*rows.published, *self._groups.blocks.take_published()]
        # Whoever found them began upon them, also where a flush has made them unfindable since.
        self._wrong += [*wrong, *self._groups.blocks.withdraw(wrong)]

    def _drop_draws(self, slots: np.ndarray, generations: np.ndarray, sequences: np.ndarray) -> None:
        columns = self._groups.columns
        is_current = columns.generation[slots] == generations
        columns.num_placeholders[slots[is_current]] -= 1
        for entry in np.flatnonzero(~is_current):
            sequence = sequences[entry]
            if sequence.num_pending_tokens and sequence.last_generation == generations[entry]:
                sequence.num_pending_tokens -= 1

    def _start_over(self) -> None:
        groups, columns = self._groups, self._groups.columns
        for group in sorted(self._moved | self._that_found(), key=groups.policy.key):
            if group in groups.running or group in groups.swapped:
                groups.recompute_later(group, publishes=False)
        self._moved, self._wrong = set(), []
        full = columns.num_computed_tokens // columns.block_size
        columns.num_published[:] = np.minimum(columns.num_published, full)
        groups.tell_all_again()

    def _that_found(self) -> set[SequenceGroup]:
        """Running groups that count tokens as computed which lie in wrong blocks: it was not them, or not yet."""
        columns, found = self._groups.columns, set()
        if not self._wrong:
            return set()
        is_wrong = np.zeros(self._groups.blocks.allocator.num_blocks, np.bool_)
        is_wrong[self._wrong] = True
        for slot in np.flatnonzero(columns.occupied):
            computed = -(-int(columns.num_computed_tokens[slot]) // columns.block_size)
            if is_wrong[columns.block_tables[slot, :computed]].any():
                found.add(columns.owner[slot].group)
        return found

    def evacuate(self) -> list[SequenceGroup]:
        """The worker is lost: all unfinished groups, in policy order, ready to wait for another one."""
        return self._groups.give_up_all()
