"""What an operator asks of a scheduler, counted where it happens: in the step loop, by event and by column.

One `Metrics` a model's name; `model_metrics.py` has them all.

Knows nothing of who reads it and how (`metrics_exporter.py`). The step loop's thread writes, and whoever admits or
refuses requests; others may read at any time.
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import NewTokens, ScheduledRows
from scheduler_svc.engine.metrics.histogram import Histogram
from scheduler_svc.leases.step_statistics import AnsweredStep
from scheduler_svc.tracing.step_trace import StepTrace

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PHASE_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Counts since the start. `counts_prefixes`: whether prompts are looked for in the prefix cache at all.

    Attributes:
        num_preemptions: groups that gave their slots up, by mode.
        num_finished: requests, by how the last of their outputs ended.
        num_prefix_queries, num_prefix_hits: prompt tokens looked for and found in the prefix cache, of requests that
            have begun; looking again after a preemption does not count.
        num_prefill_tokens: known tokens that were computed, again ones included, cached ones not.
        num_resumed: admitted requests that brought tokens of an earlier life.
        aborted_wait_s: from arrival to the end, of requests that were aborted before their first token.
        phase_s: seconds a step spent in each of its phases, by phase.
    """

    def __init__(self, counts_prefixes: bool) -> None:
        self._counts_prefixes = counts_prefixes
        self.num_preemptions: Counter[str] = Counter(swap=0, recompute=0)
        self.num_finished: Counter[FinishReason] = Counter({reason: 0 for reason in FinishReason if reason})
        self.num_prefix_queries = self.num_prefix_hits = 0
        self.num_prompt_tokens = self.num_prefill_tokens = self.num_generation_tokens = 0
        self.num_worker_losses = self.num_resumed = 0
        self.time_to_first_token_s = Histogram(_FIRST_TOKEN_S)
        self.aborted_wait_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency_s = Histogram(_BETWEEN_TOKENS_S)
        self.e2e_request_latency_s = Histogram(_REQUEST_S)
        self.request_queue_time_s = Histogram(_REQUEST_S)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self.phase_s: dict[str, Histogram] = {}

    def admitted(self, group: SequenceGroup) -> None:
        """A group was taken; called before anything of it is computed here."""
        self.num_resumed += any(sequence.num_tokens > group.num_prompt_tokens for sequence in group.sequences)

    def drawn(self, rows: ScheduledRows, columns: SequenceColumns, now_ns: int) -> None:
        """An answer with a token for each sample of the rows; called before they are taken.

        Tokens that come for a sequence which has given its slot up are left out of the times between tokens.
        """
        is_current = columns.generation[rows.sample_slots] == rows.sample_generations
        slots = rows.sample_slots if is_current.all() else rows.sample_slots[is_current]
        last_ns = columns.last_token_ns[slots]
        columns.last_token_ns[slots] = now_ns
        previous_ns = int(last_ns[0]) if len(last_ns) else 0
        if previous_ns and (last_ns == previous_ns).all():  # all of them came with one step, as most do
            self.inter_token_latency_s.observe((now_ns - previous_ns) / 1e9, len(last_ns))
            return
        is_first = last_ns == 0
        if is_first.any():
            for slot in slots[is_first]:
                self.begun(columns.owner[slot].group, now_ns)
            last_ns = last_ns[~is_first]
        self.inter_token_latency_s.observe_all((now_ns - last_ns) / 1e9)

    def generated(self, rows: ScheduledRows, tokens: NewTokens) -> None:
        """What an answer to the rows brought: tokens that somebody wants, and one for each beam."""
        self.num_generation_tokens += len(tokens.sequences) + rows.num_beam_rows

    def traced(self, trace: StepTrace, now_ns: int) -> None:
        """The answer to a step with traced requests: these are examples of the times between tokens."""
        for group, gap_ns in trace.answered(now_ns):
            if gap_ns:
                self.inter_token_latency_s.exemplify(gap_ns / 1e9, group.context)

    def begun(self, group: SequenceGroup, now_ns: int) -> None:
        """A token of the group is there. Counts it once."""
        if group.first_token_ns is not None:
            return
        group.first_token_ns = now_ns
        seconds = (now_ns - group.arrival_ns) / 1e9
        self.time_to_first_token_s.observe(seconds)
        if group.trace is not None:
            self.time_to_first_token_s.exemplify(seconds, group.trace.context)
        self.num_prompt_tokens += group.num_prompt_tokens
        self.num_prefix_queries += group.num_prompt_tokens if self._counts_prefixes else 0
        self.num_prefix_hits += group.num_cached_tokens

    def answered(self, answered: AnsweredStep) -> None:
        """One step, its preemptions and its phases."""
        step = answered.step
        self.iteration_tokens.observe(step.num_tokens)
        self.num_prefill_tokens += step.num_prefill_tokens
        if step.num_preempted:
            self.num_preemptions["swap"] += step.num_swapped_out_groups
            self.num_preemptions["recompute"] += step.num_preempted - step.num_swapped_out_groups
        for phase, nanoseconds in answered.phases_ns().items():
            histogram = self.phase_s.get(phase)
            if histogram is None:
                histogram = self.phase_s[phase] = Histogram(_PHASE_S)
            histogram.observe(nanoseconds / 1e9)

    def add(self, other: Metrics) -> None:
        """What another one has counted, too."""
        for name, value in list(vars(other).items()):
            mine = getattr(self, name)
            if isinstance(mine, Histogram):
                mine.add(value)
            elif isinstance(mine, Counter):
                mine.update(value)
            elif isinstance(mine, dict):
                for phase, histogram in list(value.items()):
                    mine.setdefault(phase, Histogram(histogram.bounds)).add(histogram)
            elif not isinstance(mine, bool):
                setattr(self, name, mine + value)

    def has_counted(self) -> bool:
        """Whether anything is other than zero."""
        for value in vars(self).values():
            if isinstance(value, Histogram):
                has_counted = bool(value.counts.any())
            elif isinstance(value, Counter):
                has_counted = any(list(value.values()))
            else:
                has_counted = bool(value) and not isinstance(value, bool)
            if has_counted:
                return True
        return False

    def ended(self, group: SequenceGroup, reason: FinishReason, now_ns: int) -> None:
        """All outputs of a request have ended, the last of them with `reason`."""
        self.num_finished[reason] += 1
        whole_s = (now_ns - group.arrival_ns) / 1e9
        queued_s = ((group.first_scheduled_ns or now_ns) - group.arrival_ns) / 1e9
        self.e2e_request_latency_s.observe(whole_s)
        self.request_queue_time_s.observe(queued_s)
        if group.trace is not None:
            self.e2e_request_latency_s.exemplify(whole_s, group.trace.context)
            self.request_queue_time_s.exemplify(queued_s, group.trace.context)
        if reason is FinishReason.ABORT and group.first_token_ns is None:
            self.aborted_wait_s.observe(whole_s)
            if group.trace is not None:
                self.aborted_wait_s.exemplify(whole_s, group.trace.context)
        self.request_prompt_tokens.observe(group.num_prompt_tokens)
        num_tokens = sum(sequence.num_tokens - group.num_prompt_tokens for sequence in group.sequences)
        self.request_generation_tokens.observe(num_tokens)
