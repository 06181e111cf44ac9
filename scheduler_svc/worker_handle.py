"""One joined worker as the step loop sees it: its scheduler, its steps in flight, what it said last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from protos import worker_pb2
from scheduler_svc.adapter_gate import AdapterGate
from scheduler_svc.block_manager import BlockSpaceManager
from scheduler_svc.preemption import Costs
from scheduler_svc.scheduler import Scheduler, SchedulerSettings
from scheduler_svc.sequence_columns import SequenceColumns
from scheduler_svc.step_plan import SchedulerOutputs
from scheduler_svc.step_statistics import StepInFlight, StepStatistics

# Heartbeats come every 0.5 s, but not while a worker's interpreter is busy. That its process is stopped, cut off or
# dead is found sooner, by gRPC's pings (`octavo.rpc`), which end the stream.
SILENCE_LIMIT_NS = 15_000_000_000
STEP_BASE_NS = 30_000_000_000  # what a step may take beside its tokens: compilation, a busy neighbour
BLOCKS_CHECKED_AT_ONCE = 16_384  # about 10 ms
STEP_SLOWNESS = 10  # times the measured prefill time that a step's tokens may take


AdapterRequest = worker_pb2.LoadAdapterRequest | worker_pb2.UnloadAdapterRequest


class WorkerLink(Protocol):
    """The open step stream to a worker, and its calls beside it. Nothing here blocks."""

    address: str
    last_heard_ns: int

    def send(self, data: bytes) -> None: ...

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        """Loads or unloads an adapter. `done` gets what went wrong, "" for nothing, on any thread."""

    def close(self) -> None: ...


class WorkerHandle:
    """State of a worker under one lease."""

    def __init__(
        self,
        link: WorkerLink,
        info: worker_pb2.WorkerInfo,
        sizes: worker_pb2.InitializeResponse,
        lease: worker_pb2.LeaseGranted,
        settings: SchedulerSettings,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.link = link
        self.info = info
        self.sizes = sizes
        self.epoch = lease.epoch
        columns = SequenceColumns(sizes.max_num_seqs, sizes.max_model_len, info.block_size)
        blocks = BlockSpaceManager(
            columns, sizes.num_device_blocks, sizes.num_host_blocks, enable_prefix_caching=enable_prefix_caching
        )
        costs = Costs(sizes.prefill_tokens_per_s, sizes.swap_bytes_per_s, sizes.block_bytes)
        self.scheduler = Scheduler(columns, blocks, sizes.max_num_batched_tokens, replace(settings, costs=costs))
        self.adapter_gate = AdapterGate(info.max_loras)
        self.adapters: dict[str, int] = {}  # that it has loaded under this lease, with their generations
        self.in_flight: deque[StepInFlight] = deque()
        self.statistics = StepStatistics()
        self.is_draining = False  # it says that it ends, or has been told to
        self.is_leaving = False  # given back as soon as it has answered
        self.failed_step: StepInFlight | None = None
        self._next_block_checked = 0
        self.checked_ns = 0  # when the integrity of its state was looked at last
        self.last_step_id = 0  # ids rise by one, and answers come in order

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def takes_new_groups(self) -> bool:
        """Whether its next step may begin groups from the queue."""
        scheduler = self.scheduler
        comes_back = scheduler.swapped or scheduler.preempted or scheduler.suspects or scheduler.on_trial
        return not (self.is_draining or self.failed_step or comes_back or scheduler.groups.next_late())

    @property
    def num_steps_answered(self) -> int:
        """The id of the last one, whether it went well or not."""
        return self.last_step_id - len(self.in_flight)

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.scheduler.running

    def check_integrity(self) -> None:
        """The scheduler's own check, each time with the next part of its blocks: a large cache holds nobody up."""
        num_blocks = self.sizes.num_device_blocks
        part = slice(self._next_block_checked, self._next_block_checked + BLOCKS_CHECKED_AT_ONCE)
        self._next_block_checked = 0 if part.stop >= num_blocks else part.stop
        self.scheduler.check_integrity(part)

    def shrink_budget(self) -> bool:
        """Halves the tokens of a step after the worker ran out of memory; False when decodes alone fill it already."""
        scheduler = self.scheduler
        smaller = max(scheduler.max_num_batched_tokens // 2, scheduler.columns.max_num_seqs)
        if smaller == scheduler.max_num_batched_tokens:
            return False
        scheduler.max_num_batched_tokens = smaller
        return True

    def can_take_step(self, max_in_flight: int) -> bool:
        """One step at a time after a failure, and while groups are on trial; none while it drains."""
        if self.is_draining:
            return False
        is_careful = self.failed_step or self.scheduler.on_trial
        return not self.in_flight if is_careful else len(self.in_flight) < max_in_flight

    def next_step_id(self) -> int:
        self.last_step_id += 1
        return self.last_step_id

    def sent(self, step_id: int, outputs: SchedulerOutputs, now_ns: int) -> StepInFlight:
        num_tokens = int(outputs.rows.query_lens.sum())
        tokens_ns = num_tokens / max(self.sizes.prefill_tokens_per_s, 1.0) * 1e9
        previous_ns = self.in_flight[-1].deadline_ns if self.in_flight else now_ns
        deadline_ns = previous_ns + STEP_BASE_NS + int(STEP_SLOWNESS * tokens_ns)
        step = StepInFlight(step_id, outputs.rows, num_tokens, now_ns, deadline_ns)
        step.take(outputs)
        self.in_flight.append(step)
        return step

    def problem(self, now_ns: int, awake_since_ns: int = 0) -> str | None:
        """Why this worker must be given up now, if it must; silence counts from `awake_since_ns` on."""
        silence_ns = now_ns - max(self.link.last_heard_ns, awake_since_ns)
        if silence_ns > SILENCE_LIMIT_NS:
            return f"no message for {silence_ns / 1e9:.1f} s"
        if self.in_flight and now_ns > self.in_flight[0].deadline_ns:
            return f"step {self.in_flight[0].step_id} is past its deadline"
        return None
