"""Where requests go: to a worker, to wait for one, or to their end."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from octavo.shared.log import trace
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.failed_requests import FailedRequests
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.metrics.model_metrics import ModelMetrics
from scheduler_svc.engine.output_sink import OutputSink
from scheduler_svc.engine.requests.live_requests import LiveRequests
from scheduler_svc.engine.step_traces import StepTraces
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.stranded_groups import StrandedGroups

log = structlog.get_logger()


class Placement:
    """Places, moves and ends groups. Each is taken out of every place that knows it when it has ended.

    Attributes:
        failed: those that it ended with an error, for the log.
    """

    def __init__(
        self,
        joined: JoinedWorkers,
        router: Router,
        stranded: StrandedGroups,
        live: LiveRequests,
        adapters: Adapters,
        metrics: ModelMetrics,
        sink: OutputSink,
        traces: StepTraces,
        clock: Callable[[], int],
        recorder: NoRecorder,
    ) -> None:
        self._joined = joined
        self._router = router
        self._waiting = router.queues
        self._stranded = stranded
        self._live = live
        self._adapters = adapters
        self._metrics = metrics
        self._sink = sink
        self._traces = traces
        self._clock = clock
        self._recorder = recorder
        self.failed = FailedRequests()

    def place(self, group: SequenceGroup) -> None:
        """Binds a group to a worker, or has it wait for one that can take it. One that brings a fault ends."""
        try:
            worker = self._router.place(group)
        except Exception as fault:
            log.error("a fault over a request", request_id=group.request_id, exception=trace(fault))
            self.end(group, FinishReason.ERROR, f"the scheduler failed over it: {type(fault).__name__}")
            return
        if worker is None:
            self._stranded.look([group], self._clock())
        else:
            self._stranded.found(group)
            self._joined.wake(worker)

    def place_unbound(self, worker: WorkerHandle) -> None:
        """Places those groups that no worker could take, and this one can by now."""
        for group in self._waiting.unbound.in_order():
            if self._router.can_run(group, worker):
                self.place(group)

    def move(self, group: SequenceGroup, left: str = "", why: str = "") -> None:
        """As `place`, for a group that a worker had, which one that finishes takes back where nobody else can.

        `left`: that worker's address, `why`: it is there no more; for the group's trace.
        """
        group.num_moves += 1
        self._traces.moved(group, left, why)
        self.place(group)
        if group in self._waiting.unbound:
            for worker in self._joined.workers:
                if worker.is_finishing and worker.can_ever_run(group):
                    self._router.bind(group, worker, group.num_tokens_to_compute)
                    self._stranded.found(group)
                    self._joined.wake(worker)
                    return

    def end(self, group: SequenceGroup, reason: FinishReason, message: str) -> None:
        """Ends a group that has not ended by itself, wherever it is; does nothing to one that was never taken."""
        if group.is_finished or not self._live.has(group):
            return
        self._release(group)
        self.tell_end(group, reason, message)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Ends one output because of a stop string in its text; does nothing to one that has ended."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._release(sequence.group, only=sequence)
            self.forget(sequence.group, FinishReason.STOP)
            if sequence.group in self._waiting.unbound:
                self.place(sequence.group)  # what is left of it may fit a worker that the whole did not

    def _release(self, group: SequenceGroup, only: Sequence | None = None) -> None:
        worker = self._router.worker_of(group)
        is_held = worker is not None and worker.scheduler.groups.holds(group)
        for sequence in [only] if only else group.unfinished():
            if worker is not None and is_held:
                worker.scheduler.finish(sequence)
                self._joined.wake(worker)
            sequence.status = SequenceStatus.FINISHED

    def tell_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool = False) -> None:
        """Forgets the group everywhere, then tells the sink."""
        self.forget(group, reason)
        if reason is FinishReason.ERROR:
            self.failed.note(group.request_id, message)
        self._sink.put_end(group, reason, message, is_invalid)

    def forget(self, group: SequenceGroup, reason: FinishReason) -> None:
        """A sequence of the group has ended; when it was the last, so has the request."""
        if group.is_finished:
            self._router.ended(group)
            self._live.free(group)
            self._recorder.has_ended(group)
            self._adapters.release(group)
            now_ns = self._clock()
            self._traces.ended(group, now_ns)
            if not group.goes_on_elsewhere:
                self._metrics.of(group.model).ended(group, reason, now_ns)
