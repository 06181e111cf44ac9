"""What a worker's answer does to the groups: tokens are appended, sequences end, beams are ranked and forked."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.blocks.suspected_blocks import SuspectedBlocks
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.sequences.beam_search import BeamHypothesis, Candidates
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints, TokenIds
from scheduler_svc.core.step_plan import Answer, NewTokens, RowFailure, ScheduledRows, WrongAnswer
from scheduler_svc.core.worker_groups import WorkerGroups


class Answers:
    """Takes answers for the groups of one worker. `served`: who is charged for generated tokens, if anybody counts."""

    def __init__(self, groups: WorkerGroups, served: ServedTokens | None) -> None:
        self._groups = groups
        self._served = served
        self._suspected = SuspectedBlocks(groups.blocks)
        # What rows of beams have answered while others of their group have not.
        self._candidates: dict[SequenceGroup, dict[Sequence, Candidates]] = {}

    def process(self, rows: ScheduledRows, answer: Answer) -> NewTokens:
        """Appends the tokens of an answer and ends sequences that are complete.

        Raises WrongAnswer, with nothing changed, for an answer that does not fit the rows.
        """
        is_answered = _check(rows, answer)
        slots, generations, sequences = rows.sample_slots, rows.sample_generations, rows.sample_sequences
        if answer.errors:
            drew = np.repeat(is_answered, rows.num_answers)[: len(slots)]
            slots, generations, sequences = slots[drew], generations[drew], sequences[drew]
        token_ids = answer.token_ids[: len(slots)]
        tokens = self._append(slots, generations, sequences, token_ids)
        if rows.num_beam_rows:
            self._take_candidates(rows, answer, is_answered, len(slots), tokens.beams)
        self._suspected.acquit(tokens.sequences)
        for row, message in answer.errors.items():
            group, is_invalid = rows.sequences[row].group, row in answer.computed_well
            is_new = not group.is_finished
            self._end_failed(rows.sequences[row], withdraws=not is_invalid)
            if is_new:
                tokens.errors.append(RowFailure(group, message, is_invalid))
        return tokens

    def forget(self, group: SequenceGroup) -> None:
        """What its beams answered will be answered again, or is wanted by nobody."""
        self._candidates.pop(group, None)

    def _append(self, slots: Ints, generations: Ints, sequences: np.ndarray, token_ids: TokenIds) -> NewTokens:
        columns = self._groups.columns
        is_current = columns.generation[slots] == generations
        if is_current.all():
            reasons = self._append_in_slots(slots, token_ids)
            is_wanted = is_current
        else:
            reasons = np.zeros(len(token_ids), np.uint8)
            reasons[is_current] = self._append_in_slots(slots[is_current], token_ids[is_current])
            is_wanted = is_current.copy()
            for entry in np.flatnonzero(~is_current):
                sequence, token_id = sequences[entry], int(token_ids[entry])
                if sequence.num_pending_tokens and sequence.last_generation == generations[entry]:
                    sequence.append(token_id)
                    sequence.num_pending_tokens -= 1
                    self._charge(sequence.group.share, 1)
                    reasons[entry] = _finish_reason(sequence, token_id)
                    is_wanted[entry] = True
        for entry in reasons.nonzero()[0]:
            self._groups.finish(sequences[entry])
        entries = np.arange(len(token_ids))
        if is_wanted is is_current or is_wanted.all():
            return NewTokens(sequences, token_ids, entries, reasons)
        return NewTokens(sequences[is_wanted], token_ids[is_wanted], entries[is_wanted], reasons[is_wanted])

    def _append_in_slots(self, slots: Ints, token_ids: TokenIds) -> np.ndarray:
        """Appends one token to each slot; the reason why it ended the sequence, where it did."""
        columns = self._groups.columns
        lengths = columns.num_tokens[slots]
        columns.token_ids[slots, lengths] = token_ids
        lengths += 1
        columns.num_tokens[slots] = lengths
        columns.num_placeholders[slots] -= 1
        if self._served is not None:
            counts = np.bincount(columns.tenant[slots])
            for tenant in np.flatnonzero(counts).tolist():
                self._charge(self._groups.tenants[tenant], int(counts[tenant]))
        reasons = np.zeros(len(slots), np.uint8)
        reasons[lengths >= columns.max_num_tokens[slots]] = FinishReason.LENGTH
        stops = token_ids == columns.eos_token_id[slots]
        for entry in columns.has_stop_token_ids[slots].nonzero()[0]:
            stops[entry] |= int(token_ids[entry]) in columns.owner[slots[entry]].group.stop_token_ids
        reasons[stops] = FinishReason.STOP
        return reasons

    def _charge(self, tenant: str, num_tokens: int) -> None:
        if self._served is not None:
            self._served.charge(tenant, num_tokens)

    @names_group
    def _end_failed(self, failed: Sequence, withdraws: bool) -> None:
        """Where it `withdraws`, nobody may find what a row that failed has computed, nor what the others of its group
        built upon it; what it found there only with proof (`SuspectedBlocks`).

        Also where the sequence has ended, or given its blocks up, since the row was sent.
        """
        blocks, group = self._groups.blocks, failed.group
        held = np.union1d(blocks.blocks_held(group), np.array(blocks.find_all(failed), np.int64))
        for sequence in group.unfinished():
            self._groups.finish(sequence)
        if withdraws:
            wrong = self._suspected.accuse(group, held)
            blocks.distrust([*wrong, *blocks.withdraw(wrong)])
        self.forget(group)

    # ---- beams ------------------------------------------------------------------------------------------------------

    def _take_candidates(
        self,
        rows: ScheduledRows,
        answer: Answer,
        is_answered: np.ndarray,
        first_entry: int,
        ended: list[tuple[SequenceGroup, list[BeamHypothesis]]],
    ) -> None:
        columns, entry = self._groups.columns, first_entry
        for row in range(len(rows) - rows.num_beam_rows, len(rows)):
            sequence, slot, generation = rows.sequences[row], rows.slots[row], rows.generations[row]
            if not is_answered[row]:
                continue
            entries = slice(entry, entry + int(answer.num_tokens[row]))
            entry = entries.stop
            if columns.generation[slot] == generation:
                columns.num_placeholders[slot] -= 1
            elif sequence.num_pending_tokens and sequence.last_generation == generation:
                sequence.num_pending_tokens -= 1
            else:
                continue
            answered = self._candidates.setdefault(sequence.group, {})
            answered[sequence] = Candidates(answer.token_ids[entries], answer.logprobs[entries])
            if all(beam in answered for beam in sequence.group.unfinished()):
                del self._candidates[sequence.group]
                self._rank(sequence.group, answered, ended)

    @names_group
    def _rank(
        self,
        group: SequenceGroup,
        answered: dict[Sequence, Candidates],
        ended: list[tuple[SequenceGroup, list[BeamHypothesis]]],
    ) -> None:
        """Chooses the beams that live on. The first child of a beam goes on in its place, others are forked from it."""
        search, parents = group.beam_search, group.sequences
        assert search is not None
        continuations = search.advance([answered[beam] for beam in parents])
        if search.is_done:
            for beam in parents:
                self._groups.finish(beam)
            ended.append((group, search.hypotheses()))
            return
        has_children = {continuation.parent for continuation in continuations}
        for index, beam in enumerate(parents):
            if index not in has_children:
                self._groups.finish(beam)
        indices = group.free_indices(parents[index] for index in has_children)
        beams: list[Sequence] = []
        for parent, _ in continuations:
            beam = parents[parent]
            if beam in beams:
                beam = beam.child(next(indices))
                if parents[parent].slot >= 0:
                    self._groups.fork_beam(parents[parent], beam)
            beams.append(beam)
        group.sequences = beams
        for beam, (_, token_id) in zip(beams, continuations, strict=True):
            beam.append(token_id)
        self._charge(group.share, len(beams))
        if group in self._groups.running:
            self._groups.ready_beams.add(group)


def _check(rows: ScheduledRows, answer: Answer) -> np.ndarray:
    """Which rows were answered. Raises WrongAnswer for an answer to other rows than these."""
    is_answered = answer.num_tokens > 0
    if len(answer.num_tokens) == len(rows) and not answer.errors:
        fits = answer.num_tokens is rows.num_answers or bool((answer.num_tokens == rows.num_answers).all())
    else:
        failed = set(answer.errors)
        fits = len(answer.num_tokens) == len(rows) and all(
            count == (0 if row in failed else wanted)
            for row, (count, wanted) in enumerate(zip(answer.num_tokens, rows.num_answers, strict=True))
        )
    if not fits or answer.num_tokens.sum() != len(answer.token_ids) or max(answer.errors, default=-1) >= len(rows):
        raise WrongAnswer(f"an answer of {len(answer.token_ids)} tokens does not fit {len(rows)} rows")
    if (rows.num_beam_rows or rows.wants_logprobs) and len(answer.logprobs) != len(answer.token_ids):
        raise WrongAnswer(f"{len(answer.token_ids)} tokens with {len(answer.logprobs)} logprobs")
    return is_answered


def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason:
    """Whether a token that came after its sequence had given the slot up ends the sequence."""
    group = sequence.group
    if group.is_stop_token(token_id):
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= group.max_num_tokens else FinishReason.NONE
