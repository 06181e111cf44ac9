"""What a step costs the scheduler: the real core and wire format, with a worker in this process that only answers.

All sequences decode steadily, with prefix caching on and starting lengths spread evenly over 512..527, so that every
step sees its share of block borders. Timed are the phases of the step loop: schedule, encode (with serialising), decode
(with parsing), process. What the simulated worker does in between is not.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scheduler_svc.core.step_plan import ScheduledRows
    from scheduler_svc.leases.worker_handle import WorkerHandle

PHASES = ("schedule", "encode", "decode", "process")
BLOCK_SIZE, FIRST_LENGTH = 16, 512
WARM_UP_STEPS = 32
STEPS_IN_FLIGHT = 2
_MAX_BATCHED_TOKENS = 1 << 16  # by which it takes steps to compute all prompts
VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of each measured step, by phase; with several workers a step is one step of each of them."""

    sequences: int
    workers: int
    waiting: int
    cached_blocks: int
    us: dict[str, np.ndarray]  # phases and their total, [steps]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the setting, and mean, median and 99th percentile of each phase in microseconds."""
        return {
            "sequences": self.sequences,
            "workers": self.workers,
            "waiting": self.waiting,
            "cached_blocks": self.cached_blocks,
            "steps": len(self.us["total"]),
            "us_per_step": {name: round(float(times.mean()), 1) for name, times in self.us.items()},
            "us_per_step_p50": {name: round(float(np.percentile(times, 50)), 1) for name, times in self.us.items()},
            "us_per_step_p99": {name: round(float(np.percentile(times, 99)), 1) for name, times in self.us.items()},
        }


def measure(sequences: int, workers: int = 1, steps: int = 256, waiting: int = 0, cached_blocks: int = 0) -> StepTimes:
    """Times `steps` steps of `sequences` sequences spread over `workers` workers.

    Args:
        waiting: further groups, which find no slot.
        cached_blocks: blocks of each worker that nobody uses and whose content can be found.
    """
    if not 1 <= workers <= sequences or steps < 1:
        raise ValueError(f"{sequences} sequences on {workers} workers over {steps} steps")
    run = _Run(sequences, workers, steps, waiting, cached_blocks)
    run.start()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(WARM_UP_STEPS):
            run.step()
        times = [run.step() for _ in range(steps)]
    finally:
        gc.unfreeze()
    run.check_all_decode()
    us = {name: np.array([step[name] for step in times]) / 1e3 for name in PHASES}
    us["total"] = np.sum([us[name] for name in PHASES], axis=0)
    return StepTimes(sequences, workers, waiting, cached_blocks, us)


def table(rows: list[StepTimes]) -> str:
    """Means, and 50th and 99th percentile of the total."""
    lines = [
        f"{'sequences':>9} {'workers':>7} {'waiting':>8} {'cached':>9}  us a step:  "
        + " ".join(f"{name:>8}" for name in (*PHASES, "total", "p50", "p99"))
    ]
    for row in rows:
        total = row.us["total"]
        values = [row.us[name].mean() for name in (*PHASES, "total")] + [*np.percentile(total, (50, 99))]
        numbers = " ".join(f"{value:8.1f}" for value in values)
        lines.append(
            f"{row.sequences:>9} {row.workers:>7} {row.waiting:>8} {row.cached_blocks:>9}" + " " * 14 + numbers
        )
    return "\n".join(lines)


class _Run:
    """Workers, their steps in flight, and the queue of waiting groups."""

    def __init__(self, sequences: int, workers: int, steps: int, waiting: int, cached_blocks: int) -> None:
        from scheduler_svc.core.queues.policy import POLICIES
        from scheduler_svc.core.queues.served_tokens import ServedTokens
        from scheduler_svc.routing.router import Router

        self._sequences = sequences
        prompts = -(-sequences // workers) * (FIRST_LENGTH + BLOCK_SIZE)
        self._num_steps = steps + WARM_UP_STEPS + 2 * STEPS_IN_FLIGHT + 2 * -(-prompts // _MAX_BATCHED_TOKENS)
        self._waiting_count = waiting
        self._cached_blocks = cached_blocks
        self._router = Router(POLICIES["fcfs"], ServedTokens(), time.monotonic_ns)
        self._in_flight: list[deque[tuple[ScheduledRows, bytes]]] = [deque() for _ in range(workers)]
        self._rng = np.random.default_rng(0)
        self._workers = [self._worker(len(range(first, sequences, workers))) for first in range(workers)]
        self._step_id = 0

    def _worker(self, max_num_seqs: int) -> WorkerHandle:
        from protos import worker_pb2
        from scheduler_svc.core.scheduler_settings import SchedulerSettings
        from scheduler_svc.leases.worker_handle import WorkerHandle

        max_model_len = FIRST_LENGTH + BLOCK_SIZE + self._num_steps + 1
        num_blocks = (max_num_seqs + 1) * -(-max_model_len // BLOCK_SIZE) + self._cached_blocks
        sizes = worker_pb2.InitializeResponse(
            num_device_blocks=int(num_blocks * 1.02),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_model_len=max_model_len,
        )
        info = worker_pb2.WorkerInfo(block_size=BLOCK_SIZE)
        worker = WorkerHandle(_NoLink(), info, sizes, worker_pb2.LeaseGranted(epoch=1), SchedulerSettings())
        self._router.join(worker)
        return worker

    def start(self) -> None:
        """Computes all prompts, and fills queue and cache."""
        for number in range(self._sequences):
            self._add(number, FIRST_LENGTH + number % BLOCK_SIZE)
        while len(self._router.queues) or any(worker.scheduler.groups.prefilling for worker in self._workers):
            self.step()
        for number in range(self._waiting_count):
            self._add(number, 8)
        for worker in self._workers:
            _fill_cache(worker, self._cached_blocks)

    def check_all_decode(self) -> None:
        """Raises RuntimeError where sequences have ended, or wait: steps were then smaller than they should be."""
        running = sum(len(worker.scheduler.groups.running) for worker in self._workers)
        if running != self._sequences:
            raise RuntimeError(f"{running} of {self._sequences} sequences were decoded to the end")

    def _add(self, number: int, num_tokens: int) -> None:
        """Workers take turns: where a router would have put it, the speed of this machine decides."""
        from protos import inference_pb2
        from scheduler_svc.core.sequences.sequence import SequenceGroup

        prompt = self._rng.integers(0, VOCAB_SIZE, num_tokens, np.int32)
        params = inference_pb2.SamplingParams(seed=1)
        longest = self._workers[0].scheduler.columns.max_model_len
        group = SequenceGroup("", prompt, params, max_num_tokens=longest, arrival_ns=0)
        self._router.bind(group, self._workers[number % len(self._workers)], num_tokens)

    def step(self) -> dict[str, int]:
        """One step of every worker, as the step loop makes it; ns by phase."""
        from protos import worker_pb2
        from scheduler_svc.engine.messages.step_encoder import decode, encode_request
        from scheduler_svc.routing.worker_queue import WorkerQueue

        spent = dict.fromkeys(PHASES, 0)
        for worker, in_flight in zip(self._workers, self._in_flight, strict=True):
            started_ns = time.perf_counter_ns()
            outputs = worker.scheduler.schedule(WorkerQueue(self._router, worker), 0)
            self._router.touch(worker)
            scheduled_ns = time.perf_counter_ns()
            spent["schedule"] += scheduled_ns - started_ns
            if outputs is not None:
                self._step_id += 1
                _, data = encode_request(outputs, 1, self._step_id)
                spent["encode"] += time.perf_counter_ns() - scheduled_ns
                in_flight.append((outputs.rows, self._answer(data)))
            if len(in_flight) < STEPS_IN_FLIGHT and outputs is not None:
                continue
            rows, answer_data = in_flight.popleft()
            received_ns = time.perf_counter_ns()
            result = worker_pb2.StepResponse.FromString(answer_data).result
            answer = decode(result.outputs, rows.num_answers)
            decoded_ns = time.perf_counter_ns()
            worker.scheduler.process_outputs(rows, answer)
            spent["decode"] += decoded_ns - received_ns
            spent["process"] += time.perf_counter_ns() - decoded_ns
        return spent

    def _answer(self, data: bytes) -> bytes:
        """What a worker says to a step, made from the step's bytes alone."""
        from protos import worker_pb2

        step = worker_pb2.StepRequest.FromString(data).step
        num_samples = step.rows.num_decode_rows + int(np.frombuffer(step.rows.num_samples_u16, "<u2").sum())
        token_ids = self._rng.integers(0, VOCAB_SIZE, num_samples).astype("<i4").tobytes()
        result = worker_pb2.StepResult(
            step_id=step.step_id, outputs=worker_pb2.SequenceOutputs(token_ids_i32=token_ids)
        )
        result.timings.total_ns = 1
        return worker_pb2.StepResponse(epoch=1, result=result).SerializeToString()


def _fill_cache(worker: WorkerHandle, count: int) -> None:
    """Publishes made-up content for blocks that are then left idle."""
    blocks = worker.scheduler.blocks
    taken = blocks.allocator.allocate(count)
    hashes = [number.to_bytes(32, "little") for number in range(count)]
    blocks.cache.publish(hashes, taken, np.full(count, -1, np.int32))
    blocks.allocator.free(taken)


class _NoLink:
    """The steps are carried by hand."""

    address = ""
    last_heard_ns = 0

    def send(self, data: bytes) -> None:
        raise AssertionError("nobody sends here")

    def call(self, request: Any, done: Any) -> None:
        raise AssertionError("nobody calls here")

    def distrust(self) -> None:
        """No clients."""

    def close(self) -> None:
        pass
