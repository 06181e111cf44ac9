"""From a plan that is full to the step as it is sent: rows in their order, and everything the worker must be told.

Rows of decodes come first, then chunks of known tokens, then those of beams.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import Chunk, ScheduledRows, SchedulerOutputs, StepPlan
from scheduler_svc.core.worker_groups import WorkerGroups

NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))  # as an entry of StepPlan.appended


def seal(plan: StepPlan, groups: WorkerGroups) -> SchedulerOutputs:
    """What a full plan sends. From now on the worker knows of everything that has changed in `groups`."""
    forks = {child: parent for child, parent in groups.forks.items()}
    appended_slots, appended_counts, appended_blocks = NOTHING
    if len(plan.appended) == 1:
        appended_slots, appended_counts, appended_blocks = plan.appended[0]
    elif plan.appended:
        appended_slots, appended_counts, appended_blocks = map(np.concatenate, zip(*plan.appended, strict=True))
    rows = _rows(plan, groups)
    outputs = SchedulerOutputs(
        rows=rows,
        released_slots=sorted(groups.released_slots),
        forks=[(parent, child) for child, parent in forks.items()],
        introductions=plan.introductions,
        swap_out=groups.swap_out,
        swap_in=groups.swap_in,
        copies=plan.copies,
        appended_slots=appended_slots,
        appended_counts=appended_counts,
        appended_blocks=appended_blocks,
        replaced=plan.replaced,
        num_preempted=plan.num_preempted + plan.num_overruled,
        num_swapped_out_groups=plan.num_swapped_out,
        news=groups.blocks.take_news(rows.published),
    )
    groups.was_told(forks)
    return outputs


def _rows(plan: StepPlan, groups: WorkerGroups) -> ScheduledRows:
    columns, decodes = groups.columns, plan.decode_slots
    published = groups.blocks.take_published()
    if not plan.chunks and not plan.beams:
        ones, generations, owners = columns.ones[: len(decodes)], columns.generation[decodes], columns.owner[decodes]
        return ScheduledRows(
            decodes,
            len(decodes),
            ones,
            ones,
            generations,
            owners,
            decodes,
            generations,
            owners,
            moved=groups.moved,
            published=published,
            wants_logprobs=columns.some_want_logprobs(decodes),
        )
    plan.chunks.sort(key=_answers_candidates)  # beams last; otherwise the order stays
    of_beams = [chunk for chunk in plan.chunks if _answers_candidates(chunk)]
    num_candidates = [_num_candidates(beam.group) for beam in plan.beams]
    others = [chunk.sequence.slot for chunk in plan.chunks] + [beam.slot for beam in plan.beams]
    slots = np.concatenate([decodes, np.array(others, np.int64)])
    query_lens, num_answers = np.ones_like(slots), np.ones_like(slots)
    query_lens[len(decodes) :] = [chunk.query_len for chunk in plan.chunks] + [1] * len(plan.beams)
    num_answers[len(decodes) :] = [chunk.num_samples for chunk in plan.chunks] + num_candidates
    drawn = [
        sequence.slot
        for chunk in plan.chunks[: len(plan.chunks) - len(of_beams)]
        if chunk.num_samples
        for sequence in (chunk.sequence, *chunk.children)
    ]
    sample_slots = np.concatenate([decodes, np.array(drawn, np.int64)])
    return ScheduledRows(
        slots,
        len(decodes),
        query_lens,
        num_answers,
        columns.generation[slots],
        columns.owner[slots],
        sample_slots,
        columns.generation[sample_slots],
        columns.owner[sample_slots],
        num_beam_rows=len(of_beams) + len(plan.beams),
        num_given_rows=len(plan.beams),
        forks=[(chunk.sequence, chunk.children) for chunk in plan.chunks if chunk.children],
        moved=groups.moved,
        published=published,
        wants_logprobs=columns.some_want_logprobs(sample_slots),
    )


def _answers_candidates(chunk: Chunk) -> bool:
    return chunk.num_samples > 0 and chunk.sequence.group.uses_beam_search


def _num_candidates(group: SequenceGroup) -> int:
    assert group.beam_search is not None
    return group.beam_search.num_candidates
