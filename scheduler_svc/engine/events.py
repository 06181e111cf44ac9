"""What happens to the step loop, one method an event: each is written down, then done.

So a record can be played: beside these, only answers of workers, loads of adapters, weights of tenants and time change
what the loop decides from, and they are written down where they come in.
"""

from __future__ import annotations

from concurrent.futures import Future

from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.failures import Failures
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.requests.live_requests import LiveRequests
from scheduler_svc.engine.step_traces import StepTraces
from scheduler_svc.engine.turnover import Turnover
from scheduler_svc.flight.entries import Kind
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink
from scheduler_svc.routing.bound_queues import BoundQueues


class Events:
    """Belongs to the step loop's thread. Answers of workers are for `StepAnswers`, what is late for `TimeLimits`."""

    def __init__(
        self,
        joined: JoinedWorkers,
        waiting: BoundQueues,
        live: LiveRequests,
        placement: Placement,
        failures: Failures,
        turnover: Turnover,
        adapters: Adapters,
        traces: StepTraces,
        recorder: NoRecorder,
    ) -> None:
        self._joined = joined
        self._waiting = waiting
        self._live = live
        self._placement = placement
        self._failures = failures
        self._turnover = turnover
        self._adapters = adapters
        self._traces = traces
        self._recorder = recorder

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submitted(self, group: SequenceGroup, begins: bool) -> None:
        """`begins`: no limit of its tenant holds it."""
        self._recorder.submitted(group, begins=begins)
        self._traces.add(group)
        if group.is_finished:  # aborted before it came here, or resumed with nothing left to do
            self._placement.forget(group, FinishReason.STOP)
        elif begins:
            self._placement.place(group)
        else:
            self._waiting.number(group)  # it has its place among those that come later, once its turn has come
        if begins:
            self._live.arrived(group)

    def due(self, group: SequenceGroup) -> None:
        """It was held for its tenant's limit, and its turn has come."""
        self._recorder.due(group)
        if not group.is_finished:
            self._placement.place(group)

    def aborted(self, group: SequenceGroup) -> None:
        """Nobody wants it any more."""
        self._recorder.ended_above(group)
        self._placement.end(group, FinishReason.ABORT, "")

    def finished(self, sequence: Sequence) -> None:
        """Its text is at its end."""
        self._recorder.finished_above(sequence)
        self._placement.finish_sequence(sequence)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def joined(self, worker: WorkerHandle, lease: worker_pb2.LeaseGranted) -> None:
        """It has granted a lease."""
        self._recorder.joined(worker, lease)
        self._turnover.join(worker)

    def lost(self, link: WorkerLink, reason: str) -> None:
        """Its stream has ended; does nothing where that is known."""
        worker = self._joined.of(link)
        if worker is not None:
            self._recorder.lost(worker, reason)
            self._failures.lose(link, reason)

    def drain(self, worker: WorkerHandle, *, may_finish: bool) -> int:
        """See `Turnover`; how many requests it has."""
        self._recorder.control(Kind.DRAIN, worker, may_finish)
        return self._turnover.drain(worker, may_finish=may_finish)

    def flush(self, address: str) -> int:
        """How many cached prefixes of a worker, or of all, could be found. Raises UnknownName."""
        workers = self._joined.at(address)
        self._recorder.control(Kind.FLUSH, *workers)
        for worker in workers:
            self._joined.wake(worker)
        return sum(worker.flush() for worker in workers)

    def withhold(self, address: str, count: int) -> int:
        """See `Turnover`; how many blocks are withheld at once. Raises UnknownName, InvalidRequest."""
        (worker,) = self._joined.at(address)
        self._recorder.control(Kind.WITHHOLD, worker, count)
        return self._turnover.withhold(worker, count)

    # ---- adapters, and the end --------------------------------------------------------------------------------------

    def load(self, name: str, path: str, caller: Future[int]) -> None:
        """See `Adapters`."""
        self._recorder.control(Kind.LOAD, name, path)
        self._adapters.load(name, path, caller)

    def unload(self, name: str, caller: Future[int]) -> None:
        """See `Adapters`."""
        self._recorder.control(Kind.UNLOAD, name)
        self._adapters.unload(name, caller)

    def stop(self) -> None:
        """What is unfinished is aborted, and every stream closed."""
        self._recorder.control(Kind.STOP)
        for group in self._live.all():
            self._placement.end(group, FinishReason.ABORT, "the server is shutting down")
        self._joined.close()
        self._adapters.close()
