"""Answered steps as readable messages, for whoever watches: grpcurl, a page, a terminal.

However many watch, a step is made into bytes once and wakes the event loop once. Watchers are few, and one that reads
more slowly than steps are answered misses some: nothing waits for them, and no memory grows with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from protos import inference_pb2 as pb
from scheduler_svc.engine.engine import Engine
from scheduler_svc.errors import TooMany
from scheduler_svc.leases.step_statistics import AnsweredStep
from scheduler_svc.leases.worker_handle import WorkerHandle

MAX_WATCHERS = 16  # each costs a write a step, on the loop that writes to clients
MAX_WAITING = 256  # steps that a watcher may be behind


class StepWatchers:
    """Shows the steps of one engine. For one event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watchers: dict[asyncio.Queue[bytes], str] = {}  # the address that each watches, "" for all
        self._stop: Callable[[], None] | None = None  # what ends the observation of steps, while somebody watches

    async def watch(self, address: str = "") -> AsyncIterator[bytes]:
        """Each step of one worker, or of all, answered from now on, as a `StepSummary`; ends with the caller.

        Raises TooMany.
        """
        check_watchers(len(self._watchers))
        steps: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._add(steps, address)
        try:
            while True:
                yield await steps.get()
        finally:
            self._remove(steps)

    def _add(self, steps: asyncio.Queue[bytes], address: str) -> None:
        self._watchers[steps] = address
        if self._stop is None:
            loop = asyncio.get_running_loop()

            def observe(worker: WorkerHandle, answered: AnsweredStep) -> None:  # on the step loop's thread
                summary = _summary(worker, answered).SerializeToString()
                loop.call_soon_threadsafe(self._show, worker.link.address, summary)

            self._stop = self._engine.observe_steps(observe)

    def _remove(self, steps: asyncio.Queue[bytes]) -> None:
        del self._watchers[steps]
        if not self._watchers and self._stop is not None:
            self._stop()
            self._stop = None

    def _show(self, worker: str, summary: bytes) -> None:
        for steps, address in self._watchers.items():
            if address in ("", worker) and not steps.full():
                steps.put_nowait(summary)


def check_watchers(count: int) -> None:
    """Raises TooMany where so many are all that may watch."""
    if count >= MAX_WATCHERS:
        raise TooMany(f"{count} clients watch steps, at most {MAX_WATCHERS} may")


def _summary(worker: WorkerHandle, answered: AnsweredStep) -> pb.StepSummary:
    step = answered.step
    return pb.StepSummary(
        worker=worker.link.address,
        epoch=worker.epoch,
        step_id=step.step_id,
        num_rows=len(step.rows),
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_tokens=step.num_decode_tokens,
        blocks_copied=len(step.copies),
        blocks_swapped_in=step.num_swapped_in_blocks,
        blocks_swapped_out=step.num_swapped_out_blocks,
        phase_ns=answered.phases_ns(),
        copies=[pb.BlockCopy(source=source, destination=destination) for source, destination in step.copies],
        num_preempted=step.num_preempted,
        num_swapped_out=step.num_swapped_out_groups,
    )
