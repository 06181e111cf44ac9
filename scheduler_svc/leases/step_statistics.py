"""What is known of an answered step, and the sums of that over a worker's steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import worker_pb2
from scheduler_svc.core.step_plan import BlockPairs, ScheduledRows, SchedulerOutputs
from scheduler_svc.tracing.step_trace import StepTrace

WORKER_PHASES = ("queue", "cache_ops", "prepare", "forward", "sample", "total")


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent: what its answer is matched against, and what was measured on this side."""

    step_id: int
    rows: ScheduledRows
    num_tokens: int  # that it computes
    sent_ns: int
    deadline_ns: int
    schedule_ns: int = 0
    encode_ns: int = 0
    num_bytes: int = 0
    trace: StepTrace | None = None  # where traced requests are in it
    num_preempted: int = 0
    num_swapped_out_groups: int = 0  # of those
    copies: BlockPairs = field(default_factory=list)  # on write, (source, destination)
    num_swapped_in_blocks: int = 0
    num_swapped_out_blocks: int = 0
    is_void: bool = False  # what it was decided upon is gone: its answer is only waited for

    def take(self, outputs: SchedulerOutputs) -> None:
        """Copies what is wanted of the decision, which is not kept."""
        self.num_preempted, self.num_swapped_out_groups = outputs.num_preempted, outputs.num_swapped_out_groups
        self.copies = outputs.copies
        self.num_swapped_in_blocks, self.num_swapped_out_blocks = len(outputs.swap_in), len(outputs.swap_out)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of rows that are no plain decode."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Tokens whose input was drawn or chosen: one a row."""
        return self.rows.num_decode_rows + self.rows.num_given_rows


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """A step with its answer. Times are in ns by phase, those of the worker as it said them."""

    step: StepInFlight
    num_bytes: int
    decode_ns: int
    process_ns: int
    wire_ns: int  # from sending to the answer, less the worker's own total
    worker_ns: dict[str, int]

    @classmethod
    def of(
        cls,
        step: StepInFlight,
        timings: worker_pb2.StepTimings,
        *,
        num_bytes: int,
        received_ns: int,
        decode_ns: int,
        process_ns: int,
    ) -> AnsweredStep:
        """Puts the times of both sides together; what neither side has measured is the wire's."""
        worker_ns = {phase: getattr(timings, f"{phase}_ns") for phase in WORKER_PHASES}
        wire_ns = max(0, received_ns - step.sent_ns - timings.total_ns)
        return cls(step, num_bytes, decode_ns, process_ns, wire_ns, worker_ns)

    def phases_ns(self) -> dict[str, int]:
        """All that the step took, in order; the worker's total is the sum of its phases."""
        here = {"schedule": self.step.schedule_ns, "encode": self.step.encode_ns, "wire": self.wire_ns}
        there = {phase: nanoseconds for phase, nanoseconds in self.worker_ns.items() if phase != "total"}
        return {**here, **there, "decode": self.decode_ns, "process": self.process_ns}


@dataclass(slots=True)
class StepStatistics:
    """Sums over the answered steps of one worker, for figures and log lines; `worker_ns` by phase as it answered."""

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # computed
    num_prefill_tokens: int = 0  # of those
    num_drawn: int = 0  # sampled, those nobody wanted any more included
    num_preempted: int = 0
    num_failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    schedule_ns: int = 0
    encode_ns: int = 0
    decode_ns: int = 0
    process_ns: int = 0
    wire_ns: int = 0
    worker_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORKER_PHASES, 0))

    def add(self, answered: AnsweredStep) -> None:
        """Counts one step."""
        step = answered.step
        self.num_steps += 1
        self.num_rows += len(step.rows)
        self.num_tokens += step.num_tokens
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_drawn += len(step.rows.sample_slots)
        self.num_preempted += step.num_preempted
        self.bytes_sent += step.num_bytes
        self.bytes_received += answered.num_bytes
        self.schedule_ns += step.schedule_ns
        self.encode_ns += step.encode_ns
        self.decode_ns += answered.decode_ns
        self.process_ns += answered.process_ns
        self.wire_ns += answered.wire_ns
        for phase, nanoseconds in answered.worker_ns.items():
            self.worker_ns[phase] += nanoseconds
