"""A worker of a simulated pool: it speaks the step protocol's messages, and its steps take virtual time.

It computes one step after another, as it was sent them. A step takes a base and a time for each token that it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.simulated_worker import answer
from protos import worker_pb2

if TYPE_CHECKING:
    from scheduler_svc.leases.worker_handle import AdapterRequest

VOCAB_SIZE = (1 << 31) - 1
BLOCK_SIZE = 16
NEVER_SILENT_NS = 1 << 62  # last heard in the far future: a lost worker ends its stream and is never merely silent


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """How large and how fast a worker is. `speed`: 0.5 takes twice as long."""

    step_ms: float = 20.0
    token_us: float = 20.0
    speed: float = 1.0
    cache_tokens: int = 307_200
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    def step_ns(self, num_tokens: int) -> int:
        """How long a step of so many tokens takes."""
        return round((self.step_ms * 1e6 + self.token_us * 1e3 * num_tokens) / self.speed)

    def info(self, name: str, max_model_len: int) -> worker_pb2.WorkerInfo:
        """What a worker of this kind says of itself to a scheduler."""
        return worker_pb2.WorkerInfo(
            instance_id=name,
            model="simulated",
            model_hash="simulated",
            device="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
        )

    def sizes(self, max_model_len: int) -> worker_pb2.InitializeResponse:
        """Its cache and bounds, as it answers `Initialize`."""
        full = self.max_num_batched_tokens
        return worker_pb2.InitializeResponse(
            num_device_blocks=self.cache_tokens // BLOCK_SIZE,
            prefill_tokens_per_s=full / (max(self.step_ns(full), 1) / 1e9),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=full,
            max_model_len=max_model_len,
        )


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step that a worker has been sent, when it will have been computed, and what it says then.

    `num_begun`: requests that begin with it, or begin again.
    """

    worker: VirtualWorker
    ends_ns: int
    answer: bytes
    num_begun: int


class VirtualWorker:
    """The link of one lease, and the worker at its other end. `was_sent` is told of it before it is to read."""

    def __init__(
        self,
        name: str,
        number: int,
        kind: WorkerKind,
        epoch: int,
        clock: Callable[[], int],
        was_sent: Callable[[VirtualWorker], None],
    ) -> None:
        self.address = name
        self.number = number
        self.kind = kind
        self.epoch = epoch
        self.last_heard_ns = NEVER_SILENT_NS
        self.is_closed = False
        self.closed_ns = 0  # when that was
        self.busy_ns = 0
        self.num_computed_tokens = 0
        self.num_steps = 0
        self._clock = clock
        self._was_sent = was_sent
        self._free_at_ns = 0
        self._unread: deque[bytes] = deque()

    def send(self, data: bytes) -> None:
        """Reads it later, so that a worker's time does not count as the scheduler's."""
        if not self._unread:
            self._was_sent(self)
        self._unread.append(data)

    def take_steps(self) -> list[RunStep]:
        """The messages sent since the last call."""
        steps = []
        while self._unread:
            request = worker_pb2.StepRequest.FromString(self._unread.popleft())
            if request.WhichOneof("kind") == "step":
                steps.append(self._take(request.step))
        return steps

    def _take(self, step: worker_pb2.Step) -> RunStep:
        num_tokens = step.rows.num_decode_rows + int(np.frombuffer(step.rows.query_lens_u32, "<u4").sum())
        took_ns = self.kind.step_ns(num_tokens)
        now_ns = self._clock()
        starts_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = starts_ns + took_ns
        self.busy_ns += took_ns
        self.num_computed_tokens += num_tokens
        self.num_steps += 1
        result = answer(step)
        timings = result.timings
        timings.queue_ns, timings.forward_ns = starts_ns - now_ns, took_ns
        timings.total_ns = self._free_at_ns - now_ns
        response = worker_pb2.StepResponse(epoch=self.epoch, result=result)
        return RunStep(self, self._free_at_ns, response.SerializeToString(), len(step.groups))

    def busy_s(self, now_s: float) -> float:
        """Seconds that it has computed by now."""
        return (self.busy_ns - max(0, self._free_at_ns - round(now_s * 1e9))) / 1e9

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        """Never called: there are no adapters."""
        raise AssertionError("it has no adapters, and nobody asks for one")

    def distrust(self) -> None:
        """Never called by a correct scheduler: everything that this worker says is well formed."""
        raise AssertionError("what it said was wrong")

    def close(self) -> None:
        """Its lease ends; what it was sent and has not computed is never answered."""
        if not self.is_closed:
            self.is_closed, self.closed_ns = True, self._clock()
