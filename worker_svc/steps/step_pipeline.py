"""The steps of one lease, in order: launched, and answered when their outputs are here.

On a CPU a step's outputs are here when it has been launched. On a GPU they come later, and the next step is launched
meanwhile, so that the device goes from one to the next without waiting for the host:

    host     launch N │ launch N+1 │ answer N │ launch N+2 │ answer N+1 ...
    device            │ step N .............│ step N+1 .............│ step N+2 ...

So it is on a CPU where another stage of the model draws (`AwaitedStep`, `StageAnswers`), with other sequences in N + 1:

    first stage   launch N │ launch N+1 │ answer N │ launch N+2 │ answer N+1 ...
    last stage             │ launch N, draw, tell  │ launch N+1, draw, tell ...

The token that step N+1 begins with is then known to the device alone (`LastTokens`). A step that needs more of the
steps before it than that waits for their outputs: one that forks a sequence or draws children from a row, since both
copy a history, and one that adjusts logits by it.

What can fail does so at the launch, before the next step is looked at: a contradiction in the message, memory that runs
out. Then the steps before it are answered first. Should outputs fail all the same, steps launched after them are rolled
back too, the last one first, and answered SKIPPED whatever they did on the device: a scheduler that resumes releases
every slot and takes nothing for granted of a skipped step.

Lives on the model thread, but for `running`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from protos import worker_pb2
from worker_svc.cache.cached_blocks import CachedBlocks
from worker_svc.errors import ProtocolError
from worker_svc.mirror.sequence_states import AppliedRows, BlockOperations, SequenceStates
from worker_svc.steps.failures import is_device_lost, is_out_of_memory, step_error
from worker_svc.steps.launched_step import Launched
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer

log = structlog.get_logger()

Deliver = Callable[[worker_pb2.StepResult], None]


class _Skipped(Exception):
    """The step that is being launched has been answered: one before it has failed."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A step between its beginning and its answer."""

    step_id: int
    timer: StepTimer
    deliver: Deliver
    operated: bool = False  # whether its block operations took place
    number: int = 0  # that `CachedBlocks` gave it, once it was launched
    rows: AppliedRows | None = None
    launched: Launched | None = None

    def answer(self, result: worker_pb2.StepResult) -> None:
        result.step_id = self.step_id
        result.timings.CopyFrom(self.timer.timings())
        self.deliver(result)


class StepPipeline:
    """Answers are delivered in the order of the steps, on the model thread."""

    def __init__(
        self,
        runner: ModelRunner,
        states: SequenceStates,
        max_num_batched_tokens: int,
        when_here: Callable[[Launched, Callable[[], None]], None],
        give_back_memory: Callable[[], None],
        end_process: Callable[[], None],
        cached_blocks: CachedBlocks | None = None,
        is_fatal: Callable[[Exception], bool] = is_device_lost,
    ) -> None:
        """
        Args:
            states: the mirror, empty.
            cached_blocks: what the cache holds from earlier leases; None: nothing.
            when_here: has a function called, on the model thread, when a launched step's outputs are on the host.
            give_back_memory: called when memory has run out.
            end_process: called after a failure that `is_fatal`; nothing is answered after that.
        """
        self._runner, self.states = runner, states
        self._cached = CachedBlocks(states.num_device_blocks) if cached_blocks is None else cached_blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._when_here, self._give_back_memory, self._end_process = when_here, give_back_memory, end_process
        self._is_fatal = is_fatal
        self._flights: deque[_Flight] = deque()
        self._running: tuple[int, int] | None = None  # the first flight: its id, and since when it is the first, in ns
        self._last_step_id = 0
        self._failed_step_id: int | None = None

    @property
    def running(self) -> tuple[int, int]:
        """Id of the step whose answer is due next and for how long it has been, in ns; (0, 0): none. On any thread."""
        running = self._running
        return (0, 0) if running is None else (running[0], time.perf_counter_ns() - running[1])

    def take(self, step: worker_pb2.Step, timer: StepTimer, deliver: Deliver) -> None:
        """Launches a step, after those that were taken before; `deliver` gets its answer, now or later."""
        flight = _Flight(step.step_id, timer, deliver)
        forgot = self._forget(step)
        if self._is_skipped(step):
            flight.answer(worker_pb2.StepResult(status=worker_pb2.STEP_STATUS_SKIPPED))
            return
        self._flights.append(flight)
        self._note_running()
        try:
            if forgot is not None:
                raise forgot
            launched = self._launch(flight, step)
        except _Skipped:
            return
        except Exception as error:
            self._settle_before(flight)
            if flight in self._flights:
                self._fail(error)
            return
        flight.launched = launched
        if self._runner.is_late:
            self._when_here(launched, lambda: self._settle_through(flight))
        else:
            self._answer_first()

    def settle(self) -> None:
        """Waits for the outputs of every step on its way, and answers it."""
        while self._flights:
            self._answer_first()

    # ---- Launching --------------------------------------------------------------------------------------------------

    def _launch(self, flight: _Flight, step: worker_pb2.Step) -> Launched:
        states, runner = self.states, self._runner
        self._check_order(step)
        if step.forks_u16 or step.rows.child_slots_u16:
            self._need_outputs_before(flight)

        def operate(operations: BlockOperations) -> None:
            self._cached.begin(step, states, operations)
            runner.operate(operations)

        states.apply_blocks(step, operate)
        flight.operated = True
        flight.timer.end_phase("cache_ops_ns")
        flight.rows = rows = states.apply_rows(step)
        self._check_budget(rows)
        if len(self._flights) > 1 and runner.waits_for_outputs(states, rows):
            self._need_outputs_before(flight)
        self._cached.compute(states, rows)
        launched = runner.launch(states, rows, flight.timer)
        flight.number = self._cached.promise(step, states)
        return launched

    def _forget(self, step: worker_pb2.Step) -> ProtocolError | None:
        """Forgets the cached blocks that the step names. Returns what is wrong with them."""
        try:
            self._cached.forget(step)
        except ProtocolError as error:
            return error
        return None

    def _is_skipped(self, step: worker_pb2.Step) -> bool:
        if self._failed_step_id is None:
            return False
        if not step.HasField("resume_after") or step.resume_after != self._failed_step_id:
            return True
        self._failed_step_id = None
        self._last_step_id = step.step_id - 1
        return False

    def _check_order(self, step: worker_pb2.Step) -> None:
        if step.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step {step.step_id} after step {self._last_step_id}")
        self._last_step_id = step.step_id

    def _check_budget(self, rows: AppliedRows) -> None:
        num_tokens, most = int(rows.query_lens.sum()), self._max_num_batched_tokens
        if num_tokens > most:
            raise ProtocolError(f"step of {num_tokens} tokens, more than {most}")

    def _need_outputs_before(self, flight: _Flight) -> None:
        self._settle_before(flight)
        if flight not in self._flights:
            raise _Skipped

    # ---- Answering --------------------------------------------------------------------------------------------------

    def _settle_before(self, flight: _Flight) -> None:
        while flight in self._flights and self._flights[0] is not flight:
            self._answer_first()

    def _settle_through(self, flight: _Flight) -> None:
        while flight in self._flights:
            self._answer_first()

    def _answer_first(self) -> None:
        flight = self._flights[0]
        assert flight.launched is not None, "only a launched step has outputs"
        try:
            outputs = flight.launched.outputs(flight.timer)
        except Exception as error:
            self._fail(error)
            return
        self._flights.popleft()
        self._note_running()
        if outputs.row_errors:
            self._distrust(flight, outputs)
        flight.answer(worker_pb2.StepResult(outputs=outputs))

    def _distrust(self, flight: _Flight, outputs: worker_pb2.SequenceOutputs) -> None:
        """What rows held over which the model failed is not passed on to a later scheduler."""
        of_model = worker_pb2.ROW_ERROR_KIND_MODEL
        bad_rows = [error.row for error in outputs.row_errors if error.kind == of_model]
        if bad_rows and flight.rows is not None:
            self._cached.fail_over(self.states, flight.rows.slots[bad_rows], is_last=not self._flights)

    def _fail(self, error: Exception) -> None:
        """The first flight has failed: those after it are skipped."""
        failed = self._flights[0]
        if is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # they hold what the step had got
            with suppress(Exception):  # the step is answered all the same
                self._give_back_memory()
        if isinstance(error, ProtocolError):  # a fault of the scheduler's; where it was found says nothing
            log.warning("step refused", step=failed.step_id, why=str(error))
        else:
            log.error("step failed", step=failed.step_id, exc_info=error)
        flights = list(self._flights)
        if self._is_fatal(error):
            self._flights.clear()
            self._end_process()
            return
        for flight in reversed(flights):
            if flight.number:
                self._cached.failed(flight.number)
            if flight.rows is not None:
                self.states.roll_back(flight.rows)
        self._flights.clear()
        self._note_running()
        self._failed_step_id = failed.step_id
        failure = step_error(error, operated=failed.operated)
        failed.answer(worker_pb2.StepResult(status=worker_pb2.STEP_STATUS_FAILED, error=failure))
        for flight in flights[1:]:
            flight.answer(worker_pb2.StepResult(status=worker_pb2.STEP_STATUS_SKIPPED))

    def _note_running(self) -> None:
        step_id = self._flights[0].step_id if self._flights else None
        if step_id is None:
            self._running = None
        elif self._running is None or self._running[0] != step_id:
            self._running = (step_id, time.perf_counter_ns())
