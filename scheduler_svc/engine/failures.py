"""What a lost worker, a broken message or a fault of our own costs: as few requests as possible, and never the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

import structlog

from octavo.shared.log import trace
from scheduler_svc.core.before_answer import BeforeAnswer
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.group_fault import GroupFault
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import groups_of
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.metrics.model_metrics import ModelMetrics
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.step_traces import StepTraces
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.flight.where import where_of
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink
from scheduler_svc.routing.rebinding import Rebinding
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.stranded_groups import StrandedGroups

log = structlog.get_logger()

MAX_FAULTS_IN_A_ROW = 16  # of our own over one worker's groups; then it may be the worker after all
FAULTS_OVER = "the scheduler failed over it, or a worker was lost, {} times"
LOSSES_IN_ALL = 4  # times --max-worker-losses: who was there each time ends, whatever trials it has passed
MAX_LOGGED = 8  # request ids of one fault


class Failures:
    """Takes groups back from workers, charges those that may have been the reason, and queues them again."""

    def __init__(
        self,
        settings: EngineSettings,
        joined: JoinedWorkers,
        placement: Placement,
        router: Router,
        rebinding: Rebinding,
        stranded: StrandedGroups,
        adapters: Adapters,
        metrics: ModelMetrics,
        traces: StepTraces,
        clock: Callable[[], int],
        recorder: NoRecorder,
    ) -> None:
        self._settings = settings
        self._joined = joined
        self._placement = placement
        self._router = router
        self._waiting = router.queues
        self._rebinding = rebinding
        self._stranded = stranded
        self._adapters = adapters
        self._metrics = metrics
        self._traces = traces
        self._clock = clock
        self._recorder = recorder

    def lose(self, link: WorkerLink, reason: str, before: BeforeAnswer | None = None) -> None:
        """Its groups go back to the queue, at the places they had, with every token that has arrived."""
        worker = self._joined.of(link)
        if worker is None:
            return
        self._joined.remove(worker)
        self._rebinding.start_over()
        waiting = self._router.leave(worker)
        self._metrics.of(worker.model).num_worker_losses += not worker.is_draining
        self._joined.last_lost_ns = None if self._joined.workers else self._clock()
        link.close()
        charged = {group for step in worker.in_flight for group in groups_of(step.rows)}
        if worker.is_draining:
            charged.clear()  # it went because it was told to
        groups = self._evacuate(worker, before)
        if not worker.is_draining:
            self._recorder.fault("worker lost", reason, link.address)
        self._recorder.left(worker)
        log.warning("worker lost", worker=link.address, why=reason, requests=len(groups))
        for step in worker.in_flight:
            self._traces.lost(step)
        why_ended = "{} workers were lost while running it"
        self.queue_again(groups, charged & set(groups), why_ended, link.address, reason)
        for group in waiting:
            self._placement.place(group)
        self._stranded.look(self._waiting.unbound.all(), self._clock())
        self._adapters.worker_left(worker)  # last: a fault over adapters is not to keep its requests here

    def fence(self, worker: WorkerHandle) -> None:
        """What a worker says is broken: that costs this worker, not the loop. Its groups start over elsewhere.

        To be called while the exception is handled.
        """
        log.exception("a worker's messages are broken", worker=worker.link.address)
        self._recorder.broken()
        self._recorder.fault("broken messages", "what a worker said is broken", worker.link.address)
        worker.link.distrust()
        self.lose(worker.link, "what it said is broken")

    def start_over(
        self,
        worker: WorkerHandle,
        fault: Exception,
        at_work: AbstractSet[SequenceGroup],
        before: BeforeAnswer | None = None,
        besides: Iterable[SequenceGroup] = (),
    ) -> None:
        """A fault of our own over a worker's groups costs what is known of it here, and not the worker.

        Its groups begin anew, on it or elsewhere. The one whom the fault names, or else all who may have been the
        reason, are charged as if a worker was lost over them: they are tried apart from others soon, and end before
        long where they bring the fault along. To be called while the exception is handled.

        Args:
            at_work: who may have been the reason.
            before: puts back what was taken of an answer that nobody has been told of.
            besides: groups that were on their way from the queue to the worker.
        """
        charged = {fault.group} if isinstance(fault, GroupFault) else at_work
        requests = sorted(group.request_id for group in charged)
        where = trace(fault)
        log.error("a fault over requests", worker=worker.link.address, requests=requests[:MAX_LOGGED], exception=where)
        self._recorder.fault("a fault over requests", where_of(fault))
        worker.num_faults += 1
        if worker.num_faults > MAX_FAULTS_IN_A_ROW:
            self.lose(worker.link, f"{worker.num_faults} faults in a row over its requests", before)
            return
        self.move_outgrown(worker)
        groups = self._evacuate(worker, before, [*at_work, *charged, *besides])
        self._router.forget_cache(worker)
        worker.start_over()
        self._router.watch_cache(worker)
        self._joined.wake(worker)
        self._adapters.step_answered(worker, is_rolled_back=True)
        self.queue_again(groups, charged, FAULTS_OVER, worker.link.address, "the scheduler failed over it")

    def take_back_unsent(self, worker: WorkerHandle) -> None:
        """Groups that a step took and that was never sent are as they were before."""
        try:
            worker.take_back_unsent()
        except Exception as fault:
            self.start_over(worker, fault, set())

    def _evacuate(
        self, worker: WorkerHandle, before: BeforeAnswer | None, besides: Iterable[SequenceGroup] = ()
    ) -> list[SequenceGroup]:
        """A worker's unfinished groups, with the tokens that their clients were told of, and those of `besides` that
        are nowhere. Who cannot be brought to that ends here."""
        scheduler = worker.scheduler
        held = scheduler.groups.all()
        try:
            groups = scheduler.evacuate()
            broken = before.restore() if before is not None else set()
        except Exception as fault:
            what, where = "requests cannot be taken back from a worker", trace(fault)
            log.error(what, worker=worker.link.address, requests=len(held), exception=where)
            groups, broken = [], set(held)
        for group in sorted({*held, *besides} - broken, key=lambda group: group.number):
            is_elsewhere = group in self._waiting or self._joined.holder_of(group) is not None
            if not (group.is_finished or group in groups or is_elsewhere):
                groups.append(group)
        for group in broken:
            for sequence in group.sequences:
                sequence.status = SequenceStatus.FINISHED
            message = "the scheduler failed over it, and cannot tell where it was"
            self._placement.tell_end(group, FinishReason.ERROR, message)
        return [group for group in groups if group not in broken]

    def queue_again(
        self,
        groups: Iterable[SequenceGroup],
        charged: AbstractSet[SequenceGroup],
        why_ended: str,
        left: str = "",
        why: str = "",
    ) -> None:
        """Groups go back to the queue, at the places they had. `why_ended`: of who has been charged too often. `left`
        and `why`: see `Placement.move`."""
        for group in charged:
            if not group.is_finished:
                group.lost_worker(self._settings.steps_in_flight + 1)
        for group in {**dict.fromkeys(groups), **dict.fromkeys(charged)}:
            most, most_in_all = self._settings.max_worker_losses, LOSSES_IN_ALL * self._settings.max_worker_losses
            if group.num_worker_losses >= most or group.num_losses_in_all >= most_in_all:
                num_losses = group.num_worker_losses if group.num_worker_losses >= most else group.num_losses_in_all
                self._placement.end(group, FinishReason.ERROR, why_ended.format(num_losses))
        for group in groups:
            if not group.is_finished:
                self._placement.move(group, left, why)

    def move_outgrown(self, worker: WorkerHandle) -> None:
        """Groups that need more than this worker's whole cache go to another one, or end."""
        for group in worker.scheduler.take_outgrown():
            self._placement.move(group, worker.link.address, "it needs more than the whole cache")
