"""Answers of workers: tokens go to clients, a failed step is rolled back, a worker that sends nonsense is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from protos import worker_pb2
from scheduler_svc.core.before_answer import BeforeAnswer
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.step_plan import Answer, WrongAnswer, groups_of
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.failures import Failures
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.messages.prompt_logprobs import take_prompt_logprobs
from scheduler_svc.engine.messages.step_encoder import decode
from scheduler_svc.engine.metrics.model_metrics import ModelMetrics
from scheduler_svc.engine.output_sink import OutputSink
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.requests.live_requests import LiveRequests
from scheduler_svc.engine.turnover import Turnover
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.step_statistics import AnsweredStep, StepInFlight
from scheduler_svc.leases.worker_claims import check_result
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink

log = structlog.get_logger()

StepObserver = Callable[[WorkerHandle, AnsweredStep], None]


class StepAnswers:
    """Belongs to the step loop's thread.

    `wanted`: another scheduler asks for the lease of this worker.
    """

    def __init__(
        self,
        joined: JoinedWorkers,
        live: LiveRequests,
        placement: Placement,
        failures: Failures,
        turnover: Turnover,
        adapters: Adapters,
        metrics: ModelMetrics,
        sink: OutputSink,
        wanted: Callable[[WorkerHandle], None],
        clock: Callable[[], int],
        recorder: NoRecorder,
    ) -> None:
        self._joined = joined
        self._live = live
        self._placement = placement
        self._failures = failures
        self._turnover = turnover
        self._adapters = adapters
        self._metrics = metrics
        self._sink = sink
        self._wanted = wanted
        self._clock = clock
        self._recorder = recorder
        self._observers: list[StepObserver] = []

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Has every answered step shown to `observer`; returns what ends that."""
        self._observers.append(observer)
        return partial(self._observers.remove, observer)

    @property
    def num_observers(self) -> int:
        """Those that have not ended."""
        return len(self._observers)

    def take(self, link: WorkerLink, data: bytes) -> None:
        """A `StepResponse`, still in bytes. One of a worker that is gone, or of an earlier lease, is dropped."""
        worker = self._joined.of(link)
        if worker is None:
            return
        self._joined.wake(worker)
        self._recorder.said(worker, data)
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
            self._wanted(worker)
            return
        log.info("worker says", worker=worker.link.address, notice=kind)
        if kind == "draining":
            if notice.draining.finishes_within_ms:
                self._turnover.drain(worker, may_finish=True)
                return
            worker.is_draining, worker.is_finishing = True, False
            self._turnover.closed(worker)
        elif kind == "adapter_loaded":
            self._adapters.was_loaded(worker, notice.adapter_loaded)
        elif kind == "budget":
            worker.set_budget(notice.budget.max_num_batched_tokens)

    def _on_result(self, worker: WorkerHandle, result: worker_pb2.StepResult, received_ns: int, num_bytes: int) -> None:
        check_result(result)
        sent = self._answered_by(worker, result)
        if sent is None:
            return
        if sent.is_void:
            if sent.trace is not None:
                sent.trace.failed(received_ns, "void")
            worker.take_void_answer(is_failure=result.status == worker_pb2.STEP_STATUS_FAILED)
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
                if sent.trace is not None:
                    sent.trace.failed(received_ns, "step_failed")
                self._on_failed_step(worker, sent, result)
            self._adapters.step_answered(worker, is_rolled_back=not is_ok)
            worker.take_back_unsent()
        except WrongAnswer:
            raise  # its fault: it is lost with this step in flight
        except Exception as fault:
            if worker.in_flight and worker.in_flight[0] is sent:
                worker.in_flight.popleft()
            groups = groups_of(sent.rows)
            self._failures.start_over(worker, fault, groups, before)
            for group in groups:
                if group.is_finished and self._live.has(group):  # who waits for its end may not have been told of it
                    self._placement.tell_end(group, FinishReason.ERROR, "the scheduler failed over its last token")

    def _answered_by(self, worker: WorkerHandle, result: worker_pb2.StepResult) -> StepInFlight | None:
        """The step that a result answers; a worker that answers what cannot be is lost, and None."""
        sent = worker.in_flight[0] if worker.in_flight else None
        problem = ""
        if sent is None or sent.step_id != result.step_id:
            problem = f"answered step {result.step_id}, which was not next"
        elif not sent.is_void:
            is_to_be_skipped = worker.failed_step is not None
            if is_to_be_skipped is not (result.status == worker_pb2.STEP_STATUS_SKIPPED):
                status = worker_pb2.StepStatus.Name(result.status)
                problem = f"answered step {result.step_id} with {status}, which cannot be"
        if problem:
            worker.link.distrust()
            self._failures.lose(worker.link, problem)
            return None
        return sent

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
        metrics = self._metrics.of(worker.model)
        metrics.drawn(sent.rows, worker.scheduler.columns, decoded_ns)
        for group, logprobs in take_prompt_logprobs(sent.rows, result.outputs, worker.info.vocab_size):
            self._sink.put_prompt_logprobs(group, logprobs)
        self._recorder.asks(sent.rows, answer)
        tokens = worker.scheduler.process_outputs(sent.rows, answer)
        worker.in_flight.popleft()
        # By group, of which several sequences may end at once.
        ended = {tokens.sequences[entry].group: entry for entry in tokens.finish_reasons.nonzero()[0]}
        if ended:
            self._recorder.ended_by(tokens)
        for group in ended:
            self._live.free_ended_id(group)  # the client may use it again as soon as it has read the end
        if len(tokens.sequences):
            self._sink.put_tokens(tokens, result.outputs)
        before.was_told()
        metrics.generated(sent.rows, tokens)
        if sent.trace is not None:
            metrics.traced(sent.trace, decoded_ns)
        for group, hypotheses in tokens.beams:
            metrics.begun(group, decoded_ns)
            self._placement.forget(group, hypotheses[0].finish_reason)
            self._sink.put_beams(group, hypotheses)
        for group, message, is_invalid in tokens.errors:
            ended.pop(group, None)
            self._placement.tell_end(group, FinishReason.ERROR, message, is_invalid)
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
        for observer in list(self._observers):
            observer(worker, answered)

    def _on_failed_step(self, worker: WorkerHandle, sent: StepInFlight, result: worker_pb2.StepResult) -> None:
        """Rolls back every step in flight, and starts over, each group of the failed step by itself."""
        if result.status == worker_pb2.STEP_STATUS_FAILED:
            worker.roll_back(sent)
            worker.statistics.num_failed += 1
            code = worker_pb2.StepErrorCode.Name(result.error.code)
            if result.error.code != worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY:
                self._recorder.fault("step failed", code, worker.link.address)
            log.warning(
                "step failed", worker=worker.link.address, step=sent.step_id, code=code, why=result.error.message
            )
            groups = groups_of(sent.rows)
            is_smaller = result.error.code == worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY and worker.shrink_budget()
            if len(groups) == 1 and not is_smaller:
                message = f"the worker could not run it: {result.error.message}"
                self._placement.end(groups.pop(), FinishReason.ERROR, message)
