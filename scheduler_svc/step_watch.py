"""Answered steps as readable messages, for whoever watches: grpcurl, a page, a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from protos import inference_pb2 as pb
from scheduler_svc.engine import Engine
from scheduler_svc.step_statistics import AnsweredStep
from scheduler_svc.worker_handle import WorkerHandle

MAX_WAITING = 1024  # a watcher that reads more slowly than steps are answered misses some


async def watch_steps(engine: Engine, address: str = "") -> AsyncIterator[pb.StepSummary]:
    """Each step of one worker, or of all, that is answered from now on; ends with the caller."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[pb.StepSummary] = asyncio.Queue(MAX_WAITING)

    def put(summary: pb.StepSummary) -> None:
        if not waiting.full():
            waiting.put_nowait(summary)

    def observe(worker: WorkerHandle, answered: AnsweredStep) -> None:
        if address in ("", worker.link.address):
            loop.call_soon_threadsafe(put, _summary(worker, answered))

    stop = engine.observe_steps(observe)
    try:
        while True:
            yield await waiting.get()
    finally:
        stop()


def _summary(worker: WorkerHandle, answered: AnsweredStep) -> pb.StepSummary:
    step = answered.step
    return pb.StepSummary(
        worker=worker.link.address,
        epoch=worker.epoch,
        step_id=step.step_id,
        num_rows=len(step.rows),
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_tokens=step.num_decode_tokens,
        blocks_copied=step.num_copied_blocks,
        blocks_swapped_in=step.num_swapped_in_blocks,
        blocks_swapped_out=step.num_swapped_out_blocks,
        phase_ns=answered.phases_ns(),
    )
