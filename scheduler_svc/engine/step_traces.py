"""Which rows of a step are those of traced requests, and what becomes of these requests."""

from __future__ import annotations

from collections.abc import Callable

from octavo.shared.tracing.context import TraceContext
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import SchedulerOutputs
from scheduler_svc.leases.step_statistics import StepInFlight
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.tracing.step_trace import Chunk, StepTrace


class StepTraces:
    """Belongs to the step loop's thread. While no request is traced, a step costs one look at an empty set.

    `clock`: nanoseconds, read for traces alone. A flight recorder writes down what the loop reads of its own clock, and
    that is the same whether anything is traced or not.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._live: set[SequenceGroup] = set()

    def add(self, group: SequenceGroup) -> None:
        """A request that may be traced has come."""
        if group.trace is not None:
            self._live.add(group)

    def ended(self, group: SequenceGroup, now_ns: int) -> None:
        """A request that may be traced has ended."""
        if group.trace is not None:
            self._live.discard(group)
            num_tokens = sum(sequence.num_tokens - group.num_prompt_tokens for sequence in group.sequences)
            group.trace.ended(group.first_token_ns, now_ns, num_tokens)

    def of_step(self, worker: WorkerHandle, outputs: SchedulerOutputs, step_id: int, now_ns: int) -> StepTrace | None:
        """What is to be written down of a step that was decided; None: no traced request is in it."""
        if not self._live:
            return None
        if outputs.num_preempted:
            self._note_preempted(now_ns)
        rows, columns = outputs.rows, worker.scheduler.columns
        traced = columns.is_traced[rows.slots].nonzero()[0].tolist()
        if not traced:
            return None
        context = TraceContext.new_root() if worker.info.traces_steps else None
        trace = StepTrace(worker.link.address, step_id, now_ns, context)
        first_chunk, first_given = rows.num_decode_rows, len(rows) - rows.num_given_rows
        for entry in traced:
            sequence: Sequence = rows.sequences[entry]
            group = sequence.group
            of_group = group.trace
            assert of_group is not None
            if of_group.is_away:
                of_group.returned(trace.worker, group.first_scheduled_ns or now_ns, now_ns)
            if first_chunk <= entry < first_given:
                num_tokens = int(rows.query_lens[entry])
                context_len = int(columns.num_computed_tokens[sequence.slot]) - num_tokens
                draws = rows.num_answers[entry] > 0
                trace.chunks.append(Chunk(of_group, num_tokens, context_len, draws))
            elif of_group.has_enough:
                columns.is_traced[sequence.slot] = False
            else:
                trace.decodes.append(of_group)
        return trace if trace.chunks or trace.decodes else None

    def moved(self, group: SequenceGroup, left: str, why: str) -> None:
        """A request that may be traced goes on elsewhere than at the address that it `left`."""
        if group.trace is not None:
            group.trace.moved(left, why, self._clock())

    def lost(self, step: StepInFlight) -> None:
        """The worker of a step that may be traced is gone."""
        if step.trace is not None:
            step.trace.failed(self._clock(), "worker_lost")

    def _note_preempted(self, now_ns: int) -> None:
        """Which of them were preempted since the last look."""
        for group in self._live:
            if group.num_preemptions and group.trace is not None:
                is_swapped = any(sequence.status is SequenceStatus.SWAPPED for sequence in group.sequences)
                group.trace.preempted(group.num_preemptions, "swap" if is_swapped else "recompute", now_ns)
