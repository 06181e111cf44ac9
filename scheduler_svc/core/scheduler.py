"""Decides what one worker computes in its next step: continuous batching under a budget of tokens and sequences.

There are no phases: a sequence's computed tokens catch up with its tokens, whether they are a prompt, a chunk of one, a
recomputation after preemption or the last draw. Decodes come first, then prompts that are half computed, then groups
that come back, swapped ones before the others, then new ones. Without chunked prefill a step computes whole prompts or
decodes, and prompts go first. Knows nothing of clocks (time is passed in), sockets, text or the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.answers import Answers
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.prompt_delay import PromptDelay
from scheduler_svc.core.queues.group_source import GroupSource
from scheduler_svc.core.recovery import Recovery
from scheduler_svc.core.row_filler import RowFiller
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sealed_step import seal
from scheduler_svc.core.sequences.group_fault import names_group
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import (
    UNBOUNDED,
    Answer,
    NewTokens,
    ScheduledRows,
    SchedulerOutputs,
    SchedulingBudget,
    StepPlan,
    groups_of,
)
from scheduler_svc.core.trials import Trials
from scheduler_svc.core.worker_groups import WorkerGroups


class Scheduler:
    """The running, swapped and preempted groups of one worker.

    Args:
        columns, blocks: the worker's slots and cache.
        max_num_batched_tokens: tokens that one step computes at most.

    Attributes:
        groups: of this worker, and where each of them is.
        trials: whose the steps are, where they are not everybody's.
        tells_releases: the next step is made even where it only says which slots were given up.
    """

    def __init__(
        self,
        columns: SequenceColumns,
        blocks: BlockSpaceManager,
        max_num_batched_tokens: int,
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self.columns = columns
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.groups = groups = WorkerGroups(columns, blocks, self.settings.policy)
        self.tells_releases = False
        self._preemption = Preemption(groups, self.settings.preemption_mode, self.settings.costs)
        self._rows = RowFiller(groups, self._preemption, self.settings.num_micro_batches)
        self._answers = Answers(groups, self.settings.served if self.settings.policy.counts_tokens else None)
        self._admission = Admission(groups, self.settings, self._preemption, self._rows, self._answers)
        self.trials = Trials(groups, self._preemption, self._rows, self._admission)
        self._recovery = Recovery(groups)
        self._delay = PromptDelay(self.settings.delay_factor)
        self._has_step: AbstractSet[SequenceGroup] | None = None  # see `Trials.alone`, of the last decision

    @property
    def num_decoding(self) -> int:
        """Sequences whose prompts are computed, whether the next step has their rows or not."""
        return self.columns.max_num_seqs - self.columns.num_free_slots - len(self.groups.prefilling)

    def can_ever_run(self, group: SequenceGroup) -> bool:
        """Whether this worker, empty, could hold what there is of the group, and every length that it may reach."""
        num_blocks = self.blocks.allocator.num_usable
        return (
            group.max_num_tokens <= self.columns.max_model_len
            and group.num_prompt_tokens <= num_blocks * self.blocks.block_size  # quick to say, of all that wait
            and group.num_slots <= self.columns.max_num_seqs
            and self.blocks.num_blocks_of(group) <= num_blocks
        )

    # ---- deciding a step --------------------------------------------------------------------------------------------

    def schedule(
        self, waiting: GroupSource, now_ns: int, is_quiet: bool = True, most_prompt_tokens: int = UNBOUNDED
    ) -> SchedulerOutputs | None:
        """Fills one step; None when there is nothing to send (what was released then waits for the next step).

        `is_quiet`: nothing is in flight, so groups may be put on trial, and who cannot get on will not by waiting.
        `most_prompt_tokens`: of this step, be it full or not.
        """
        trials, rows, admission, groups = self.trials, self._rows, self._admission, self.groups
        budget = SchedulingBudget(self.max_num_batched_tokens, self.columns.max_num_seqs, most_prompt_tokens)
        plan = StepPlan(budget)
        alone = self._has_step = trials.alone(waiting)
        if alone is None:
            admission.make_way(plan, waiting)
            if is_quiet and trials.has_candidate(waiting):
                self._has_step = trials.on_trial
                trials.try_next(plan, waiting, now_ns)
                alone = trials.on_trial
        is_chunked = self.settings.enable_chunked_prefill
        if not is_chunked and alone is None and self._may_start_prompts(waiting, now_ns):
            admission.admit(plan, waiting, now_ns, trials.on_trial)
        is_of_prompts = bool(plan.chunks)
        if not is_of_prompts:
            rows.add_decodes(plan, alone, trials.on_trial)
            rows.add_chunks(plan, alone, trials.on_trial)
            if alone is not None and is_quiet and not plan.has_rows:
                trials.make_way_for(plan, alone)
                alone = alone if plan.has_rows else None  # None: they had to give way themselves, and others go on
            if alone is not None or not trials.on_trial:
                self._preemption.start_over_if_stuck(plan)
            # What was taken from one group is not given to another at once, unless nobody is left to have it.
            may_admit = alone is None and not (plan.num_preempted and groups.running)
            if may_admit and (is_chunked or groups.swapped or not groups.running):
                admission.admit(plan, waiting, now_ns, trials.on_trial)
            if alone is None and is_quiet and not plan.has_rows and (trials.on_trial or trials.could_try(waiting)):
                alone = self._has_step = trials.on_trial  # nobody else can get on
                trials.try_after_all(plan, waiting, now_ns)
        if not (plan.has_rows or groups.swap_out or groups.swap_in or self.tells_releases):
            return None
        self.tells_releases = False
        if plan.has_rows:
            trials.was_sent(alone)
        outputs = seal(plan, groups)
        if is_of_prompts and outputs is not None:
            self._delay.sent(outputs.rows, now_ns)
        return outputs

    def groups_at_work(self) -> set[SequenceGroup]:
        """Of whom a step is being made, besides those who wait: a fault over it may be that of any of them."""
        if self._has_step is not None:
            return set(self._has_step)
        return {*self.groups.running, *self.groups.swapped[:1], *self.groups.preempted[:1]}

    def _may_start_prompts(self, waiting: GroupSource, now_ns: int) -> bool:
        """Without chunked prefill: whether a step of prompts comes now, before decodes go on."""
        groups = self.groups
        self._delay.look(now_ns)
        if groups.prefilling or groups.swapped:
            return False  # decodes have to make room, or a prompt that no step can hold is being computed in parts
        earliest_ns = waiting.earliest_arrival_ns()
        if not groups.running or groups.preempted or earliest_ns is None:
            return True
        return self._delay.is_over(earliest_ns, now_ns)

    # ---- groups that may go elsewhere -------------------------------------------------------------------------------

    def take_outgrown(self) -> list[SequenceGroup]:
        """Groups that need more than this whole cache, as the last steps found: they are here no more."""
        outgrown, self._admission.outgrown = self._admission.outgrown, []
        return outgrown

    def releasable(self) -> list[SequenceGroup]:
        """Groups that wait to come back, in order, but those with draws or blocks on the way."""
        returning = (*self.groups.swapped, *self.groups.preempted)
        return [group for group in returning if not (group.num_pending_tokens or group in self.groups.moved)]

    def release(self, group: SequenceGroup) -> None:
        """Gives up a group of `releasable`, which goes on at another worker: what was computed of it here is left."""
        self._answers.forget(group)
        self.groups.forget(group)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def process_outputs(self, rows: ScheduledRows, answer: Answer) -> NewTokens:
        """Appends the tokens of an answer, and ends sequences that are complete.

        Raises WrongAnswer, with nothing changed, for an answer that does not fit the rows.
        """
        tokens = self._answers.process(rows, answer)
        self._delay.ended(rows)
        if self.groups.suspects and self.groups.suspects[0] in groups_of(rows):
            self.groups.suspects.popleft()
        return tokens

    @names_group
    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its blocks are free for the next step."""
        self.groups.finish(sequence)
        group = sequence.group
        if group.is_finished:
            self._answers.forget(group)

    def abort(self, group: SequenceGroup) -> None:
        """Ends all sequences of the group; steps in flight may still bring tokens for them, which are dropped."""
        for sequence in group.unfinished():
            self.finish(sequence)

    # ---- failure ----------------------------------------------------------------------------------------------------

    def roll_back(self, failed: ScheduledRows, skipped: Iterable[ScheduledRows] = ()) -> None:
        """Starts over after a step that failed; those in flight behind it will be skipped, and their tokens not come.

        The groups of the failed step become suspects. Nothing may be scheduled before the skipped steps are answered.
        """
        steps = [failed, *skipped]
        self._recovery.roll_back(steps)
        for rows in steps:
            self._delay.ended(rows)
        for group in self.groups.running:
            self._answers.forget(group)
        groups = (group for group in groups_of(failed) if group in self.groups.running)
        self.groups.suspects = deque(sorted(groups, key=self.settings.policy.key))

    def take_back(self, rows: ScheduledRows) -> None:
        """Starts over before a step that was never sent; nothing is in flight."""
        suspects = self.groups.suspects
        self.roll_back(rows)
        self.groups.suspects = deque(group for group in suspects if group in self.groups.running)

    def evacuate(self) -> list[SequenceGroup]:
        """The worker is lost: all unfinished groups, in policy order, ready to wait for another one."""
        return self._recovery.evacuate()

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError when queues, columns and blocks (see `BlockAllocator`) contradict one another."""
        self.groups.check_integrity(part)
