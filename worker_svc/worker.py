"""The worker behind the servicer: sizes the cache, and runs steps in order on the model thread.

A failed step is answered FAILED with nothing of its rows left in the mirror; every later one is SKIPPED, untouched,
until a step says `resume_after` with the failed step's id. Never decides what runs. Methods may be called from any
thread; what they start runs on the model thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future

import structlog
import torch

from protos import worker_pb2
from worker_svc.cache_sizing import Limits, size_cache
from worker_svc.config import WorkerConfig
from worker_svc.device_memory import memory_of
from worker_svc.errors import ProtocolError
from worker_svc.memory import GIB, available_bytes
from worker_svc.model_runner import ModelRunner
from worker_svc.model_thread import ModelThread
from worker_svc.profile import Profile, Profiler
from worker_svc.sequence_states import AppliedRows, SequenceStates
from worker_svc.step_timer import StepTimer

log = structlog.get_logger()

Deliver = Callable[[worker_pb2.StepResult], None]


class Worker:
    """A model runner, its mirror, and the thread on which both live."""

    def __init__(self, runner: ModelRunner, config: WorkerConfig, thread: ModelThread | None = None) -> None:
        """`thread` is the one that loaded the model, where it was loaded on one (`server.load` says why)."""
        self.config = config
        self.thread = thread or ModelThread()
        self._runner = runner
        self._memory = memory_of(runner.device, config.gpu_memory_utilization)
        self._profiler = Profiler(runner, self._memory)
        self._profile: Profile | None = None
        self._limits: Limits | None = None  # that `_sizes` were made for
        self._sizes: worker_pb2.InitializeResponse | None = None
        self._epoch = 0  # of the lease whose steps count; 0: none
        self._states: SequenceStates | None = None
        self._last_step_id = 0
        self._failed_step_id: int | None = None
        self._running: tuple[int, int] | None = None  # step id, start in ns

    # ---- Sizes ------------------------------------------------------------------------------------------------------

    @property
    def bounds(self) -> Limits:
        """The most that this worker takes, before Initialize."""
        asked = self.config.max_model_len
        max_model_len = asked if isinstance(asked, int) else self._runner.config.max_model_len
        return Limits(self.config.max_num_seqs, self.config.max_num_batched_tokens, max_model_len)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._runner.device

    @property
    def sizes(self) -> worker_pb2.InitializeResponse | None:
        """What Initialize answered last; None before."""
        return self._sizes

    def is_initialized_for(self, limits: Limits) -> bool:
        """Whether Initialize would only repeat its answer."""
        return self._limits == limits

    def initialize(self, limits: Limits) -> Future[worker_pb2.InitializeResponse]:
        """Measures a step (the first time), sizes and allocates the cache. The future may hold a StartupError."""
        return self.thread.call(lambda: self._initialize(limits))

    def _initialize(self, limits: Limits) -> worker_pb2.InitializeResponse:
        if self._sizes is not None and self._limits == limits:
            return self._sizes
        runner = self._runner
        self._limits, self._sizes = None, None
        if self._profile is None:
            self._profile = self._profiler.measure(self.bounds)
        runner.release_cache()
        sizes = size_cache(
            self.config,
            limits,
            runner.block_bytes,
            self._memory.available_bytes(),
            self._profiler.step_bytes(self._profile, limits),
            None if self._memory.is_host else available_bytes(),
        )
        runner.allocate_cache(sizes.num_device_blocks, sizes.num_host_blocks)
        swap_gib = round(sizes.num_host_blocks * runner.block_bytes / GIB, 3)
        log.info(
            "cache allocated",
            blocks=sizes.num_device_blocks,
            host_blocks=sizes.num_host_blocks,
            swap_space_gib=swap_gib if self.config.swap_space is not None else f"{swap_gib} by default",
        )
        self._sizes = worker_pb2.InitializeResponse(
            num_device_blocks=sizes.num_device_blocks,
            num_host_blocks=sizes.num_host_blocks,
            prefill_tokens_per_s=self._profile.prefill_tokens_per_s,
            swap_bytes_per_s=self._profiler.swap_bytes_per_s(),
            max_num_seqs=sizes.limits.max_num_seqs,
            max_num_batched_tokens=sizes.limits.max_num_batched_tokens,
            max_model_len=sizes.limits.max_model_len,
            block_bytes=runner.block_bytes,
            settings_id=uuid.uuid4().hex,
        )
        self._limits = limits
        return self._sizes

    # ---- Leases -----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Future[None]:
        """Steps of `epoch` count from now on, on an empty mirror."""
        self._epoch = epoch
        return self.thread.call(self._reset)

    def end(self) -> Future[None]:
        """Throws away steps that have not started; done when the one that has is over."""
        self._epoch = 0
        return self.thread.call(lambda: None)

    def answered(self) -> Future[None]:
        """Done when every step submitted so far has been answered."""
        return self.thread.call(lambda: None)

    def _reset(self) -> None:
        assert self._sizes is not None, "a lease before Initialize"
        self._states = SequenceStates(
            self._sizes.max_num_seqs,
            self._sizes.max_model_len,
            self.config.block_size,
            self._sizes.num_device_blocks,
            self._sizes.num_host_blocks,
        )
        self._last_step_id = 0
        self._failed_step_id = None

    # ---- Steps ------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[int, int]:
        """Id of the step that runs and its age in ns; (0, 0) when none does."""
        running = self._running
        return (0, 0) if running is None else (running[0], time.perf_counter_ns() - running[1])

    def submit(self, epoch: int, step: worker_pb2.Step, arrived_ns: int, deliver: Deliver) -> None:
        """Runs a step after those before it; `deliver` gets the answer, on the model thread."""
        self.thread.submit(lambda: self._answer(epoch, step, arrived_ns, deliver))

    def _answer(self, epoch: int, step: worker_pb2.Step, arrived_ns: int, deliver: Deliver) -> None:
        if epoch != self._epoch:
            return  # of a lease that has ended
        timer = StepTimer(arrived_ns)
        self._running = (step.step_id, time.perf_counter_ns())
        try:
            result = self._run(step, timer)
        finally:
            self._running = None
        result.step_id = step.step_id
        result.timings.CopyFrom(timer.timings())
        deliver(result)

    def _run(self, step: worker_pb2.Step, timer: StepTimer) -> worker_pb2.StepResult:
        if self._is_skipped(step):
            return worker_pb2.StepResult(status=worker_pb2.STEP_STATUS_SKIPPED)
        states, rows, operated = self._states, None, False
        assert states is not None, "a step before a lease"
        try:
            self._check_order(step)
            states.apply_blocks(step, self._runner.operate)
            operated = True
            timer.end_phase("cache_ops_ns")
            rows = states.apply_rows(step)
            self._check_budget(rows)
            return worker_pb2.StepResult(outputs=self._runner.run(states, rows, timer))
        except Exception as error:
            return self._fail(step, error, rows, operated)

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
        assert self._sizes is not None, "a step before Initialize"
        num_tokens, most = int(rows.query_lens.sum()), self._sizes.max_num_batched_tokens
        if num_tokens > most:
            raise ProtocolError(f"step of {num_tokens} tokens, more than {most}")

    def _fail(
        self, step: worker_pb2.Step, error: Exception, rows: AppliedRows | None, operated: bool
    ) -> worker_pb2.StepResult:
        log.error("step failed", step=step.step_id, exc_info=error)
        assert self._states is not None
        if rows is not None:
            self._states.roll_back(rows)
        self._failed_step_id = step.step_id
        code = _error_code(error)
        if code == worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY:
            self._memory.give_back()  # what the step had got before it failed
        message = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
        first_line = message.splitlines()[0]
        return worker_pb2.StepResult(
            status=worker_pb2.STEP_STATUS_FAILED,
            error=worker_pb2.StepError(code=code, message=first_line, block_operations_applied=operated),
        )


def _error_code(error: Exception) -> worker_pb2.StepErrorCode:
    if isinstance(error, ProtocolError):
        return worker_pb2.STEP_ERROR_CODE_PROTOCOL
    return worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY if is_out_of_memory(error) else worker_pb2.STEP_ERROR_CODE_INTERNAL


# What says so in words alone: torch's allocator on the CPU, cuBLAS, and Triton when it loads a kernel.
_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
