"""The state of a step's sequences before its answer was taken, to go back to when a fault interrupts that.

A client must get every token, and each once. So tokens that were appended but not handed out when the fault came are
taken back; they are drawn again, and are the same. Knows nothing of slots and blocks: when this puts sequences back,
they have none.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import Answer, ScheduledRows


class BeforeAnswer:
    """Made for every answer, so it keeps columns; what is dear to keep it keeps only where it may be wanted."""

    def __init__(self, rows: ScheduledRows, answer: Answer, columns: SequenceColumns) -> None:
        self._sequences = rows.sample_sequences
        self._lengths = columns.num_tokens[rows.sample_slots]
        self._is_current = columns.generation[rows.sample_slots] == rows.sample_generations
        self._late: dict[Sequence, int] = {}  # that gave up the slot before the answer came
        if not self._is_current.all():
            late = self._sequences[~self._is_current]
            self._late = {s: s.num_tokens for s in late if s.num_pending_tokens and s.slot < 0}
        self._siblings: list[Sequence] = []  # of rows that ended in an error, which end with them
        if answer.errors:
            groups = {rows.sequences[row].group for row in answer.errors}
            self._siblings = [sequence for group in groups for sequence in group.unfinished()]
        self._of_beams = {sequence.group for sequence in rows.sequences[len(rows) - rows.num_beam_rows :]}
        self._is_told = False

    def was_told(self) -> None:
        """Its tokens are on their way to the clients: what comes now cannot take them back."""
        self._is_told = True

    def restore(self) -> set[SequenceGroup]:
        """Puts sequences without a slot back to where they stood; the groups of which that is not possible."""
        broken = {group for group in self._of_beams if not (group.is_finished or _is_whole(group))}
        if self._is_told:
            return broken
        current = self._sequences[self._is_current]
        lengths = dict(zip(current.tolist(), self._lengths[self._is_current].tolist(), strict=True))
        for sequence, length in {**lengths, **self._late}.items():
            sequence.truncate(length)
        for sequence in (*lengths, *self._late, *self._siblings):
            if sequence.status is SequenceStatus.FINISHED and not sequence.group.uses_beam_search:
                sequence.status = SequenceStatus.WAITING
        return broken


def _is_whole(group: SequenceGroup) -> bool:
    """Whether a search and its sequences agree: they change together, and a fault may have come between."""
    search, first = group.beam_search, group.num_prompt_tokens
    if search is None or search.is_done or search.num_live != len(group.unfinished()):
        return False
    return all(
        np.array_equal(beam.token_ids[first:], search.live_token_ids(index))
        for index, beam in enumerate(group.sequences)
    )
