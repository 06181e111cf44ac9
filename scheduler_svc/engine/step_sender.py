"""Schedules, encodes and sends steps, until a worker has as many in flight as it may."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from octavo.shared.log import trace
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.group_fault import GroupFault
from scheduler_svc.core.step_plan import SchedulerOutputs, groups_of, introduced_groups
from scheduler_svc.engine.failures import FAULTS_OVER, Failures
from scheduler_svc.engine.messages.step_encoder import UnsendableGroup, encode_request
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.step_traces import StepTraces
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.rebinding import Rebinding
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.worker_queue import WorkerQueue

log = structlog.get_logger()


class StepSender:
    """Belongs to the step loop's thread. A fault in making a step costs the requests it is over, never the loop."""

    def __init__(
        self,
        steps_in_flight: int,
        router: Router,
        rebinding: Rebinding,
        placement: Placement,
        failures: Failures,
        traces: StepTraces,
        clock: Callable[[], int],
        recorder: NoRecorder,
    ) -> None:
        self._steps_in_flight = steps_in_flight
        self._router = router
        self._rebinding = rebinding
        self._placement = placement
        self._failures = failures
        self._traces = traces
        self._clock = clock
        self._recorder = recorder

    def fill(self, worker: WorkerHandle) -> None:
        """Schedules, encodes and sends steps until the worker has as many as it may have in flight."""
        self._take_over(worker)
        while worker.can_take_step(self._steps_in_flight) and worker.has_something_to_do:
            started_ns = self._clock()
            outputs = self._schedule(worker, started_ns)
            if outputs is None or not self._send(worker, outputs, started_ns):
                return

    def _take_over(self, worker: WorkerHandle) -> None:
        """A worker that has nothing to begin may have what others could spare."""
        try:
            if self._rebinding.is_due(worker):
                self._rebinding.take_over(worker)
        except Exception as fault:  # those who wait stay where they are
            log.error("a fault over who waits", worker=worker.link.address, exception=trace(fault))

    def _schedule(self, worker: WorkerHandle, now_ns: int) -> SchedulerOutputs | None:
        """The worker's next step; None: none can be made now, or not without a fault."""
        scheduler = worker.scheduler
        view = WorkerQueue(self._router, worker)
        is_deciding = False
        try:
            if worker.in_flight and scheduler.trials.has_candidate(view):
                return None  # whose rows must be the only ones in flight
            is_deciding = True
            is_quiet, most = not worker.in_flight, worker.most_prompt_tokens
            outputs = scheduler.schedule(view, now_ns, is_quiet=is_quiet, most_prompt_tokens=most)
            self._failures.move_outgrown(worker)
            # The watchdog: whoever runs must get on, or a step that brings them on must be in flight.
            stands_still = outputs is None and not worker.in_flight and scheduler.groups.has_work
            assert not stands_still, "work is there, and no step can be made of it"
            return outputs
        except Exception as fault:
            if is_deciding or not isinstance(fault, GroupFault):
                self._failures.start_over(worker, fault, {*scheduler.groups_at_work(), *view.taken}, besides=view.taken)
            else:  # nothing was changed, only asked
                log.error("a fault over a request", request_id=fault.group.request_id, exception=trace(fault))
                self._failures.queue_again((), {fault.group}, FAULTS_OVER)
            return None

    def _send(self, worker: WorkerHandle, outputs: SchedulerOutputs, started_ns: int) -> bool:
        """Encodes and sends a step; False where that cannot be."""
        scheduled_ns = self._clock()
        resume_after = worker.failed_step.step_id if worker.failed_step else None
        traced = self._traces.of_step(worker, outputs, worker.next_step_id, scheduled_ns)
        try:
            step, data = encode_request(outputs, worker.epoch, worker.next_step_id, resume_after, traced)
        except UnsendableGroup as fault:
            request_id, where = fault.group.request_id, trace(fault)
            log.error("a step cannot be sent", worker=worker.link.address, request_id=request_id, exception=where)
            worker.unsent = outputs.rows
            self._placement.end(fault.group, FinishReason.ERROR, f"no step with it can be sent: {fault}")
            self._failures.take_back_unsent(worker)
            return False
        except Exception as fault:
            introduced = set(introduced_groups(outputs.introductions))
            self._failures.start_over(worker, fault, introduced | groups_of(outputs.rows))
            return False
        sent_ns = self._clock()
        sent = worker.sent(step.step_id, outputs, sent_ns)
        self._recorder.sent(worker, outputs, step.step_id, data)
        worker.link.send(data)
        sent.schedule_ns, sent.encode_ns = scheduled_ns - started_ns, sent_ns - scheduled_ns
        sent.num_bytes, sent.trace = len(data), traced
        return True
