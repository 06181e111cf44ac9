"""One `Execute` stream: steps in, answers, heartbeats and notices out, for as long as its lease lasts.

Lives on the event loop; the model thread only ever hands answers over. A lease ends when the stream does (the scheduler
closes it, or its connection is found dead), when nothing comes for `lease.EXPIRY_S`, or when the worker drains.

Steps are read only while those that were read before, up to the writing of their answers, are few and small: what a
scheduler sends beyond that waits on its side of the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import grpc
import structlog

from octavo.shared.tracing.tracer import Tracer
from protos import worker_pb2
from worker_svc.service.lease import EXPIRY_S, Lease
from worker_svc.service.step_span import StepSpan
from worker_svc.steps.step_pipeline import Deliver
from worker_svc.steps.worker import Worker

log = structlog.get_logger()

HEARTBEAT_INTERVAL_S = 0.5
MAX_STEPS = 32  # read and not answered: several times what any scheduler has in flight
MAX_STEP_BYTES = 64 << 20  # of those together, beyond which no further one is read
MAX_UNWRITTEN = 64  # messages that wait to be written, beyond which no heartbeat is added
STALL_S = 0.25  # a timer that is later than this tells of a process that was stopped or starved


class LeaseExpired(Exception):
    """Nothing was heard from the scheduler for too long."""


class StepSession:
    """The exchange with the scheduler that holds `lease`."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        worker: Worker,
        lease: Lease,
        instance_id: str,
        tracer: Tracer | None = None,
    ) -> None:
        self.peer: str = context.peer()
        self._context = context
        self._worker = worker
        self._lease = lease
        self._instance_id = instance_id
        self._tracer = tracer
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[worker_pb2.StepResponse | None] = asyncio.Queue()
        self._draining = asyncio.Event()
        self._step_bytes: deque[int] = deque()  # of each step that was read and whose answer is not written
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._used_s = time.monotonic()  # when a step came last, or an answer went

    async def run(self) -> None:
        """Returns when the scheduler has closed the stream or the worker has drained. Raises LeaseExpired, and
        StartupError where the worker has other sizes by now."""
        granted = await asyncio.wrap_future(self._worker.begin(self._lease.epoch))
        granted.instance_id, granted.epoch = self._instance_id, self._lease.epoch
        meanwhile, self._outbox = self._outbox, asyncio.Queue()
        self._say(notice=worker_pb2.Notice(lease=granted))  # before all others
        while not meanwhile.empty():
            self._outbox.put_nowait(meanwhile.get_nowait())
        writer = asyncio.create_task(self._write())
        others = [asyncio.create_task(work()) for work in (self._read, self._beat, self._expire, self._drain)]
        try:
            done, _ = await asyncio.wait([writer, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (writer, *others):
                task.cancel()

    def finish(self, seconds: float) -> None:
        """Tells the scheduler how much longer steps are taken, for requests that no other worker can continue."""
        self._used_s = time.monotonic()
        draining = worker_pb2.Draining(finishes_within_ms=int(seconds * 1000))
        self._say(notice=worker_pb2.Notice(draining=draining))

    @property
    def unused_s(self) -> float:
        """For how long nothing has been here to compute."""
        return 0.0 if self._step_bytes else time.monotonic() - self._used_s

    def drain(self) -> None:
        """Tells the scheduler, answers what has been received, and ends the stream."""
        self._draining.set()

    def tell_adapter(self, epoch: int, name: str, generation: int) -> None:
        """An adapter has been loaded under the lease of this epoch."""
        if epoch == self._lease.epoch:
            loaded = worker_pb2.AdapterState(name=name, generation=generation)
            self._say(notice=worker_pb2.Notice(adapter_loaded=loaded))

    def tell_wanted(self) -> None:
        """Another scheduler wants the lease; at most one message of it waits to be written for each heartbeat."""
        if self._outbox.qsize() <= MAX_UNWRITTEN:
            self._say(notice=worker_pb2.Notice(wanted=worker_pb2.LeaseWanted()))

    async def _read(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            arrived_ns = time.perf_counter_ns()
            if request.epoch != self._lease.epoch:
                continue
            self._lease.heard(time.monotonic())
            if request.HasField("step") and not self._draining.is_set():
                self._step_bytes.append(request.step.ByteSize())
                self._used_s = time.monotonic()
                self._worker.submit(request.epoch, request.step, arrived_ns, self._delivery(request.step))
                if len(self._step_bytes) >= MAX_STEPS or sum(self._step_bytes) > MAX_STEP_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()

    def _delivery(self, step: worker_pb2.Step) -> Deliver:
        """What takes the step's answer; of one with traced requests, it makes the step's span, too."""
        if self._tracer is None or not step.HasField("trace"):
            return self._deliver
        span, emit = StepSpan.of(step, self._instance_id, time.monotonic_ns()), self._tracer.emit
        if span is None:
            return self._deliver

        def deliver(result: worker_pb2.StepResult) -> None:
            self._deliver(result)
            emit(span.ended(result, time.monotonic_ns()))

        return deliver

    def _deliver(self, result: worker_pb2.StepResult) -> None:
        """On the model thread."""
        response = worker_pb2.StepResponse(epoch=self._lease.epoch, result=result)
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, response)

    async def _write(self) -> None:
        while (response := await self._outbox.get()) is not None:
            await self._context.write(response)
            if response.HasField("result"):
                self._used_s = time.monotonic()
                self._step_bytes.popleft()  # answers come in the order of the steps
                self._has_room.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            if self._outbox.qsize() > MAX_UNWRITTEN:
                continue  # the scheduler does not read
            step_id, age_ns = self._worker.running
            self._say(heartbeat=worker_pb2.Heartbeat(running_step_id=step_id, running_ns=age_ns))

    async def _expire(self) -> None:
        while (left_s := self._lease.expires_in_s(time.monotonic())) > 0:
            due_s = time.monotonic() + left_s
            await asyncio.sleep(left_s)
            if time.monotonic() - due_s > STALL_S:  # it was this process that slept, and messages wait to be read
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            if not self._has_room.is_set():
                self._lease.heard(time.monotonic())  # it is here that nothing is read
        raise LeaseExpired(f"nothing was heard from the scheduler for {EXPIRY_S:g} s")

    async def _drain(self) -> None:
        await self._draining.wait()
        self._say(notice=worker_pb2.Notice(draining=worker_pb2.Draining()))
        await asyncio.wrap_future(self._worker.answered())
        self._outbox.put_nowait(None)  # follows the last answer; ends the writer, and with it the session
        await asyncio.Event().wait()

    def _say(self, **kind: Any) -> None:
        self._outbox.put_nowait(worker_pb2.StepResponse(epoch=self._lease.epoch, **kind))
