"""The step loop: one thread that owns the waiting queues and every worker's scheduler.

Everything that happens to it (a request, an abort, an answer, a worker that joins or is lost) is a function put into
its inbox; nothing else touches scheduler state. Tokens leave through an `OutputSink`. Knows nothing of text or of how
messages travel.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import structlog

from octavo.shared.log import trace
from protos import worker_pb2
from scheduler_svc.core.before_answer import BeforeAnswer
from scheduler_svc.core.finish_reason import FinishReason
from scheduler_svc.core.group_fault import GroupFault
from scheduler_svc.core.policy import POLICIES
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.served_tokens import ServedTokens
from scheduler_svc.core.step_plan import Answer, SchedulerOutputs, WrongAnswer, groups_of
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.engine.failures import FAULTS_OVER, Failures
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.engine.model_metrics import ModelMetrics
from scheduler_svc.engine.output_sink import OutputSink
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.prompt_logprobs import take_prompt_logprobs
from scheduler_svc.engine.step_encoder import UnsendableGroup, decode, encode_request
from scheduler_svc.engine.time_limits import WATCH_INTERVAL_S, TimeLimits
from scheduler_svc.engine.turn_watch import Turns
from scheduler_svc.errors import NotReady, RequestRefused
from scheduler_svc.leases.step_statistics import AnsweredStep, StepInFlight
from scheduler_svc.leases.worker_claims import check_result
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink
from scheduler_svc.routing.rebinding import Rebinding
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.stranded_groups import StrandedGroups
from scheduler_svc.routing.worker_queue import WorkerQueue
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()
T = TypeVar("T")

StepObserver = Callable[[WorkerHandle, AnsweredStep], None]


class Engine:
    """Start it, let workers join, submit groups. Methods of the first two sections may be called from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        sink: OutputSink,
        vital: VitalParts | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`clock`: nanoseconds, that of `arrival_ns` of groups and of `last_heard_ns` of links."""
        self.settings = settings
        self._clock = clock
        self._sink = sink
        self.metrics = ModelMetrics(counts_prefixes=settings.enable_prefix_caching)
        self.joined = JoinedWorkers()
        self.workers = self.joined.workers
        self._served = served = ServedTokens(settings.tenant_weights)
        self._scheduler_settings = SchedulerSettings(
            policy=POLICIES[settings.scheduling_policy],
            enable_chunked_prefill=settings.enable_chunked_prefill,
            delay_factor=settings.scheduler_delay_factor,
            preemption_mode=settings.preemption_mode,
            served=served,
        )
        policy, is_caching = self._scheduler_settings.policy, settings.enable_prefix_caching
        self.router = Router(policy, served, clock, enable_prefix_caching=is_caching)
        self._rebinding = Rebinding(self.router, clock)
        self._waiting = self.router.queues
        self._stranded = StrandedGroups(self._waiting.unbound, self.workers)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        vital = vital or VitalParts()
        self._thread = vital.thread("step-loop", self._run, lambda: self._has_stopped)
        self.turns = Turns()  # of that thread, at least four a second
        self._has_stopped = False
        self._step_observers: list[StepObserver] = []
        self.on_wanted: Callable[[WorkerHandle], None] = lambda worker: None  # another scheduler asks for its lease
        self.adapters = Adapters(self._inbox.put, self.joined.wake, self._on_adapter_loaded)
        self.live = LiveRequests(self._waiting, settings.max_waiting_requests, settings.max_waiting_tokens)
        self._placement = Placement(
            self.joined, self.router, self._stranded, self.live, self.adapters, self.metrics, sink, clock
        )
        self._failures = Failures(
            settings,
            self.joined,
            self._placement,
            self.router,
            self._rebinding,
            self._stranded,
            self.adapters,
            self.metrics,
            clock,
        )
        self.time_limits = TimeLimits(
            settings.worker_wait_timeout_s,
            self.joined,
            self._placement,
            self._failures,
            self._waiting,
            self._stranded,
            self._rebinding,
            clock,
        )

    # ---- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; what was put into the inbox before is done first."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop and closes every worker's stream; what is unfinished is aborted."""
        self.live.close()
        self._inbox.put(self._on_stop)
        if self._thread.is_alive():
            self._thread.join()
            return
        try:
            self.take_events()  # of a loop that somebody else turned, or that has ended before its time
        except Exception:
            log.exception("the step loop cannot be ended in order")

    def submit(self, group: SequenceGroup) -> None:
        """Queues a group. Raises what `Adapters.use` and `LiveRequests.add` raise."""
        group.share = self._served.share_of(group.tenant, is_known=self.settings.tenants_are_known)
        try:
            self.adapters.use(group)
            if group.has_resumed_tokens and not group.is_resumed:
                group.is_resumed = self.live.admitted_before.take(group.request_id)
            self.live.add(group)
        except RequestRefused as refusal:
            if group.is_resumed:
                self.live.admitted_before.learn([group.request_id])
            self._inbox.put(partial(self.adapters.release, group))
            self.metrics.rejected(refusal)
            raise
        self.metrics.of(group.model).admitted(group)
        self._inbox.put(partial(self._on_submitted, group))

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends live requests of this id, of one tenant or of all, with ABORT; False when there is none."""
        groups = self.live.find(request_id, tenant)
        for group in groups:
            self.abort_group(group)
        return bool(groups)

    def abandon(self, group: SequenceGroup) -> None:
        """Its client is gone, and may come back with `resume`: a turn that it had is given back to it once."""
        if group.first_scheduled_ns is not None and not group.is_finished:
            self.live.admitted_before.learn([group.request_id])
        self.abort_group(group)

    def abort_group(self, group: SequenceGroup) -> None:
        """Ends the group with ABORT, and tells the sink."""
        self._inbox.put(partial(self._placement.end, group, FinishReason.ABORT, ""))

    def finish_sequence(self, sequence: Sequence) -> None:
        """The layer above found the end of a sequence's text: it wants no more tokens of it."""
        if sequence.group.unfinished() == [sequence]:
            self.live.free(sequence.group)  # the client may use it again as soon as it has read the end
        self._inbox.put(partial(self._placement.finish_sequence, sequence))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the step loop's thread, between steps, for a consistent look at its state."""
        if self.live.is_closed:
            raise NotReady("this server is shutting down")
        future: Future[T] = Future()
        self._inbox.put(partial(_fulfil, future, function))
        return future

    def observe_steps(self, observer: StepObserver) -> Callable[[], None]:
        """Has every answered step shown to `observer`, on the step loop's thread; returns what ends that."""
        self._step_observers.append(observer)
        return partial(self._step_observers.remove, observer)

    def drain_worker(self, address: str, *, may_finish: bool = False) -> int:
        """Gives a worker no more steps, and gives it back once it has answered those it has. Its requests move.

        `may_finish`: where no other worker has its model, it ends its requests first; new ones it gets no more.

        Returns how many they are. Raises UnknownName.
        """
        return self.call(lambda: self._drain(address, may_finish)).result()

    def flush_prefix_cache(self, address: str = "") -> int:
        """Forgets cached prefixes, of one worker or of all; what runs keeps its blocks. How many could be found.

        Raises UnknownName.
        """
        return self.call(lambda: self._flush(address)).result()

    def load_adapter(self, name: str, path: str) -> Future[int]:
        """Loads an adapter on every worker that takes them; its generation, or a RequestRefused. See `Adapters`."""
        return self._answer_later(partial(self.adapters.load, name, path))

    def unload_adapter(self, name: str) -> Future[int]:
        """Unloads an adapter once the requests that use it have ended; its generation, or a RequestRefused."""
        return self._answer_later(partial(self.adapters.unload, name))

    def _answer_later(self, begin: Callable[[Future[int]], None]) -> Future[int]:
        if self.live.is_closed:
            raise NotReady("this server is shutting down")
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # a caller who goes away stops nothing
        self._inbox.put(partial(_begin, future, begin))
        return future

    # ---- from worker clients ----------------------------------------------------------------------------------------

    def worker_joined(
        self,
        link: WorkerLink,
        info: worker_pb2.WorkerInfo,
        sizes: worker_pb2.InitializeResponse,
        lease: worker_pb2.LeaseGranted,
        model: str = "",
    ) -> None:
        """`model`: the fingerprint of what it serves. It gets the groups of that one alone."""
        settings, is_caching = self._scheduler_settings, self.settings.enable_prefix_caching
        worker = WorkerHandle(link, info, sizes, lease, settings, is_caching, model)
        self.live.admitted_before.learn(lease.request_ids)
        self._inbox.put(partial(self._on_joined, worker))

    def worker_said(self, link: WorkerLink, data: bytes) -> None:
        """A `StepResponse`, still in bytes, so that the thread which reads the socket does nothing else."""
        self._inbox.put(partial(self._on_message, link, data))

    def worker_lost(self, link: WorkerLink, reason: str) -> None:
        """Its groups go to other workers, or wait; a link that is not here any more is ignored."""
        self._inbox.put(partial(self._failures.lose, link, reason))

    # ---- the step loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._has_stopped:
            self.turns.note()
            self.take_events()
            self.send_steps()

    def take_events(self, wait_s: float = WATCH_INTERVAL_S) -> None:
        """Waits so long for something to happen, then takes all that has: one schedule answers many events.

        With `send_steps` the whole of the loop, for a caller who runs it himself in place of `start`. Where the clock
        is not that of the machine, such a caller waits for nothing: 0.
        """
        try:
            event = self._inbox.get(timeout=wait_s)
            while True:
                self._take(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            self.time_limits.watch()

    def _take(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception:
            log.exception("an event of the step loop failed")

    def send_steps(self) -> None:
        """Fills every worker that something has happened to, and no other."""
        self._wake_one_idle()
        for worker in self.joined.take_due():
            if not self.joined.has(worker):
                continue  # it was lost meanwhile
            self._fill(worker)
            if not self.joined.has(worker):
                continue
            self.router.touch(worker)
            if worker.in_flight:
                self.joined.idle.pop(worker, None)
            elif worker.is_leaving or (worker.is_finishing and not worker.has_something_to_do):
                worker.is_draining = True
                self._failures.lose(worker.link, "it is drained")
            else:
                self.joined.idle[worker] = None

    def _wake_one_idle(self) -> None:
        """Somebody waits, and not for want of workers: the next one that has nothing to do looks whom it can take."""
        if self.joined.idle and len(self.workers) > 1 and self.router.has_some_to_spare:
            self.joined.wake_next_idle()

    def _fill(self, worker: WorkerHandle) -> None:
        """Schedules, encodes and sends steps until the worker has as many as it may have in flight."""
        self._take_over(worker)
        while worker.can_take_step(self.settings.steps_in_flight) and worker.has_something_to_do:
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
        view = WorkerQueue(self.router, worker)
        is_deciding = False
        try:
            if worker.in_flight and scheduler.trials.has_candidate(view):
                return None  # whose rows must be the only ones in flight
            is_deciding = True
            outputs = scheduler.schedule(view, now_ns, is_quiet=not worker.in_flight)
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
        try:
            step, data = encode_request(outputs, worker.epoch, worker.next_step_id, resume_after)
        except UnsendableGroup as fault:
            request_id, where = fault.group.request_id, trace(fault)
            log.error("a step cannot be sent", worker=worker.link.address, request_id=request_id, exception=where)
            worker.unsent = outputs.rows
            self._placement.end(fault.group, FinishReason.ERROR, f"no step with it can be sent: {fault}")
            self._failures.take_back_unsent(worker)
            return False
        except Exception as fault:
            introduced = {introduction.sequence.group for introduction in outputs.introductions}
            self._failures.start_over(worker, fault, introduced | groups_of(outputs.rows))
            return False
        sent_ns = self._clock()
        sent = worker.sent(step.step_id, outputs, sent_ns)
        worker.link.send(data)
        sent.schedule_ns, sent.encode_ns = scheduled_ns - started_ns, sent_ns - scheduled_ns
        sent.num_bytes = len(data)
        return True

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _on_message(self, link: WorkerLink, data: bytes) -> None:
        worker = self.joined.of(link)
        if worker is None:
            return
        self.joined.wake(worker)
        try:
            received_ns = self._clock()
            response = worker_pb2.StepResponse.FromString(data)
            if response.epoch != worker.epoch:
                return
            kind = response.WhichOneof("kind")
            if kind == "result":
                self._on_result(worker, response.result, received_ns, len(data))
            elif kind == "notice":
                self._on_notice(worker, response.notice)
        except Exception:
            self._failures.fence(worker)

    def _on_notice(self, worker: WorkerHandle, notice: worker_pb2.Notice) -> None:
        kind = notice.WhichOneof("notice")
        if kind == "wanted":  # again and again
            self.on_wanted(worker)
            return
        log.info("worker says", worker=worker.link.address, notice=kind)
        if kind == "draining":
            if notice.draining.finishes_within_ms:
                self._drain_worker(worker, may_finish=True)
                return
            worker.is_draining, worker.is_finishing = True, False
            self._on_closed(worker)
        elif kind == "adapter_loaded":
            self.adapters.was_loaded(worker, notice.adapter_loaded)
        elif kind == "budget":
            worker.set_budget(notice.budget.max_num_batched_tokens)

    def _on_result(self, worker: WorkerHandle, result: worker_pb2.StepResult, received_ns: int, num_bytes: int) -> None:
        check_result(result)
        if not worker.in_flight or worker.in_flight[0].step_id != result.step_id:
            worker.link.distrust()
            self._failures.lose(worker.link, f"answered step {result.step_id}, which was not next")
            return
        sent = worker.in_flight[0]
        if sent.is_void:
            worker.take_void_answer(is_failure=result.status == worker_pb2.STEP_STATUS_FAILED)
            return
        is_to_be_skipped = worker.failed_step is not None
        if is_to_be_skipped is not (result.status == worker_pb2.STEP_STATUS_SKIPPED):
            status = worker_pb2.StepStatus.Name(result.status)
            worker.link.distrust()
            self._failures.lose(worker.link, f"answered step {result.step_id} with {status}, which cannot be")
            return
        is_ok, before = result.status == worker_pb2.STEP_STATUS_OK, None
        answer = decode(result.outputs, sent.rows.num_answers, worker.info.vocab_size) if is_ok else None
        try:
            if answer is not None:
                before = BeforeAnswer(sent.rows, answer, worker.scheduler.columns)
                self._take_answer(worker, sent, answer, result, received_ns, num_bytes, before)
                worker.went_well(sent, received_ns)
            else:
                worker.in_flight.popleft()
                self._on_failed_step(worker, sent, result)
            self.adapters.step_answered(worker, is_rolled_back=not is_ok)
            worker.take_back_unsent()
        except WrongAnswer:
            raise  # its fault: it is lost with this step in flight
        except Exception as fault:
            if worker.in_flight and worker.in_flight[0] is sent:
                worker.in_flight.popleft()
            groups = groups_of(sent.rows)
            self._failures.start_over(worker, fault, groups, before)
            for group in groups:
                if group.is_finished and self.live.has(group):  # who waits for its end may not have been told of it
                    self._placement.tell_end(group, FinishReason.ERROR, "the scheduler failed over its last token")

    def _take_answer(
        self,
        worker: WorkerHandle,
        sent: StepInFlight,
        answer: Answer,
        result: worker_pb2.StepResult,
        received_ns: int,
        num_bytes: int,
        before: BeforeAnswer,
    ) -> None:
        decoded_ns = self._clock()
        metrics = self.metrics.of(worker.model)
        metrics.drawn(sent.rows, worker.scheduler.columns, decoded_ns)
        for group, logprobs in take_prompt_logprobs(sent.rows, result.outputs, worker.info.vocab_size):
            self._sink.put_prompt_logprobs(group, logprobs)
        tokens = worker.scheduler.process_outputs(sent.rows, answer)
        worker.in_flight.popleft()
        if len(tokens.sequences):
            self._sink.put_tokens(tokens, result.outputs)
        before.was_told()
        metrics.generated(sent.rows, tokens)
        for group, hypotheses in tokens.beams:
            metrics.begun(group, decoded_ns)
            self._placement.forget(group, hypotheses[0].finish_reason)
            self._sink.put_beams(group, hypotheses)
        # By group, of which several sequences may end at once.
        ended = {tokens.sequences[entry].group: entry for entry in tokens.finish_reasons.nonzero()[0]}
        for group, message in tokens.errors:
            ended.pop(group, None)
            self._placement.tell_end(group, FinishReason.ERROR, message)
        for group, entry in ended.items():
            self._placement.forget(group, FinishReason(tokens.finish_reasons[entry]))
        answered = AnsweredStep.of(
            sent,
            result.timings,
            num_bytes=num_bytes,
            received_ns=received_ns,
            decode_ns=decoded_ns - received_ns,
            process_ns=self._clock() - decoded_ns,
        )
        worker.statistics.add(answered)
        metrics.answered(answered)
        for observer in list(self._step_observers):
            observer(worker, answered)

    def _on_failed_step(self, worker: WorkerHandle, sent: StepInFlight, result: worker_pb2.StepResult) -> None:
        """Rolls back every step in flight, and starts over, each group of the failed step by itself."""
        if result.status == worker_pb2.STEP_STATUS_FAILED:
            worker.roll_back(sent)
            worker.statistics.num_failed += 1
            code = worker_pb2.StepErrorCode.Name(result.error.code)
            log.warning(
                "step failed", worker=worker.link.address, step=sent.step_id, code=code, why=result.error.message
            )
            groups = groups_of(sent.rows)
            is_smaller = result.error.code == worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY and worker.shrink_budget()
            if len(groups) == 1 and not is_smaller:
                message = f"the worker could not run it: {result.error.message}"
                self._placement.end(groups.pop(), FinishReason.ERROR, message)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _on_submitted(self, group: SequenceGroup) -> None:
        if group.is_finished:  # aborted before it came here, or resumed with nothing left to do
            self._placement.forget(group, FinishReason.STOP)
        else:
            self._placement.place(group)
        self.live.arrived(group)

    def _on_adapter_loaded(self, worker: WorkerHandle) -> None:
        self._placement.place_unbound()
        self.joined.wake(worker)

    def _on_closed(self, worker: WorkerHandle) -> None:
        """It takes no more groups: those that wait for it wait for others."""
        self.adapters.worker_left(worker)
        for group in self.router.close(worker):
            self._placement.place(group)

    def _on_joined(self, worker: WorkerHandle) -> None:
        for other in self.workers:
            if other.is_finishing and other.model == worker.model:
                self.give_back(other)
        self.joined.add(worker)
        self.router.join(worker)
        self.joined.last_lost_ns = None
        self.joined.wake(worker)
        self._stranded.look(self._waiting.unbound.all(), self._clock())
        self._placement.place_unbound()
        self.adapters.worker_joined(worker)
        log.info(
            "worker joined",
            worker=worker.link.address,
            instance=worker.info.instance_id,
            epoch=worker.epoch,
            blocks=worker.sizes.num_device_blocks,
            cached_blocks=worker.num_adopted,
        )

    def _drain(self, address: str, may_finish: bool = False) -> int:
        (worker,) = self.joined.at(address)
        return self._drain_worker(worker, may_finish)

    def _drain_worker(self, worker: WorkerHandle, may_finish: bool) -> int:
        others = (other for other in self.workers if other is not worker and other.model == worker.model)
        if not may_finish or not all(other.is_closing for other in others):
            return self.give_back(worker)
        worker.is_finishing = True
        self.router.loads.close(worker)
        self.joined.wake(worker)
        where, num_running = worker.link.address, worker.num_running
        log.info("worker is drained, and ends its requests first", worker=where, requests=num_running)
        return _num_held(worker)

    def give_back(self, worker: WorkerHandle) -> int:
        """See `drain_worker`; on the step loop's thread."""
        worker.is_draining = worker.is_leaving = True
        worker.is_finishing = False
        self._on_closed(worker)
        self.joined.wake(worker)
        log.info("worker is drained", worker=worker.link.address, requests=worker.num_running)
        return _num_held(worker)

    def _flush(self, address: str) -> int:
        workers = self.joined.at(address)
        self.joined.due.update(dict.fromkeys(workers))
        return sum(worker.flush() for worker in workers)

    def _on_stop(self) -> None:
        for group in self.live.all():
            self._placement.end(group, FinishReason.ABORT, "the server is shutting down")
        self.joined.close()
        self.adapters.close()
        self._has_stopped = True


def _num_held(worker: WorkerHandle) -> int:
    return len(worker.scheduler.groups.all())


def _begin(future: Future[int], begin: Callable[[Future[int]], None]) -> None:
    try:
        begin(future)
    except Exception as error:
        future.set_exception(error)


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the caller is gone
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
