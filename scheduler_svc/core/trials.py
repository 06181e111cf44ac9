"""Which groups have steps to themselves: those of a failed step, and those that a worker was lost under.

So a group that brings down every worker that runs it takes few others with it. A few groups at a time are on trial,
until they have got past where they were when the worker was lost. Every second step is theirs while others have
something to do.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.blocks.block_manager import AllocStatus
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.queues.group_source import GroupSource
from scheduler_svc.core.row_filler import RowFiller
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_groups import WorkerGroups

MAX_ON_TRIAL = 8  # groups at once that lost a worker under them once; who lost two is tried alone


class Trials:
    """Says whose the next step is, and puts groups on trial.

    Attributes:
        on_trial: groups that a worker was lost under.
    """

    def __init__(self, groups: WorkerGroups, preemption: Preemption, rows: RowFiller, admission: Admission) -> None:
        self.on_trial: set[SequenceGroup] = set()
        self._groups = groups
        self._preemption = preemption
        self._rows = rows
        self._admission = admission
        self._was_trial = False  # the last step was theirs

    def alone(self, waiting: GroupSource) -> AbstractSet[SequenceGroup] | None:
        """Who has this step to itself: a group of a failed step, or those on trial; None: all who are not on trial."""
        self._forget_over()
        if self._groups.suspects:
            return {self._groups.suspects[0]}
        if self.on_trial and not (self._was_trial and self._others_have_work(waiting)):
            return self.on_trial
        return None

    def was_sent(self, alone: AbstractSet[SequenceGroup] | None) -> None:
        """Takes note of whose the step was that is sent now."""
        self._was_trial = bool(self.on_trial) and alone is self.on_trial

    def _forget_over(self) -> None:
        """Who has passed, ended or given way is on trial no more; who gave way is tried again when it comes back."""
        if self.on_trial:
            self.on_trial = {group for group in self.on_trial & self._groups.running if group.is_on_trial}

    def _others_have_work(self, waiting: GroupSource) -> bool:
        """Whether somebody who is not on trial has something to do: a step is theirs after one of trials."""
        is_here = len(self._groups.running) > len(self.on_trial) or self._groups.swapped or self._groups.preempted
        return bool(is_here) or waiting.peek() is not None

    def has_candidate(self, waiting: GroupSource) -> bool:
        """Whether a group waits that has lost a worker, and is to be tried now: it is the turn of trials."""
        if waiting.peek_trial() is None or (self._was_trial and self._others_have_work(waiting)):
            return False
        return self.could_try(waiting)

    def could_try(self, waiting: GroupSource) -> bool:
        """Whether there is room for the next group on trial, and nobody comes back before it."""
        group, first = waiting.peek_trial(), self._admission.next_held()
        if group is None or (first is not None and not self._groups.policy.overrules(group, first)):
            return False
        return self._admission.can_admit(group) is AllocStatus.OK

    def try_next(self, plan: StepPlan, waiting: GroupSource, now_ns: int) -> None:
        """Puts the next groups on trial: one that lost two workers alone, otherwise a few together."""
        while not plan.budget.is_spent and len(self.on_trial) < MAX_ON_TRIAL and self.could_try(waiting):
            group = waiting.peek_trial()
            assert group is not None, "a candidate comes from there"
            if group.num_worker_losses > 1 and self.on_trial:
                return
            self.on_trial.add(group)  # before a fault can come of it
            self._admission.admit_new(plan, group, waiting, now_ns)
            if group.num_worker_losses > 1:
                return

    def try_after_all(self, plan: StepPlan, waiting: GroupSource, now_ns: int) -> None:
        """It is not the turn of those on trial, but nobody else can get on."""
        self._forget_over()  # they may have had to give way in this very step
        if not self.on_trial:
            self.try_next(plan, waiting, now_ns)
            return
        self._rows.add_decodes(plan, self.on_trial, self.on_trial)
        self._rows.add_chunks(plan, self.on_trial, self.on_trial)
        if not plan.has_rows:
            self.make_way_for(plan, self.on_trial)
            self._preemption.start_over_if_stuck(plan)
            if not self.on_trial:  # else a step that came of it is theirs alone
                self._admission.admit(plan, waiting, now_ns)

    def make_way_for(self, plan: StepPlan, alone: AbstractSet[SequenceGroup]) -> None:
        """Whoever pauses for the groups that run alone holds blocks, too: the last in order give theirs up."""
        while not plan.has_rows and self._groups.running & alone and (others := self._groups.running - alone):
            self._preemption.preempt_for_step(max(others, key=self._groups.policy.key), plan)
            self._rows.add_chunks(plan, alone, self.on_trial)
        if not plan.has_rows:
            self.on_trial.clear()
            self._rows.add_decodes(plan, None, self.on_trial)
            self._rows.add_chunks(plan, None, self.on_trial)
