"""Frames of a server for all who look at it with one key: one `WatchSteps`, ten looks a second at most, while any look.

Steps say that something has happened, and what was copied and preempted; a look shows how it stands. Everybody gets the
newest frame when they have taken the one before, so who reads slowly misses frames and holds nothing up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Protocol

import grpc
import structlog

from gateway_svc.live.frames import MAX_BLOCKS, MAX_REQUESTS, frame
from gateway_svc.live.step_tally import StepTally
from octavo.errors import RequestFailed
from octavo.shared.log import trace
from protos import inference_pb2 as pb

log = structlog.get_logger()

FRAME_S = 0.1  # between two looks
QUIET_S = 0.5  # until a look where no step says that there is something new: requests come, wait and are ended
RETRY_S = 1.0  # until a scheduler that does not answer is asked again
# It has answered: this key is not to see that. Nothing changes by asking again.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)


class Watched(Protocol):
    """A scheduler as somebody may see it. Both raise RequestFailed."""

    def watch_steps(self) -> AsyncGenerator[pb.StepSummary, None]:
        """From now on, without an end."""

    async def view(self, request: pb.GetViewRequest) -> pb.View:
        """How it stands."""


class LiveFeed:
    """For one event loop. `extras`: what every frame says besides."""

    def __init__(self, scheduler: Watched, **extras: Any) -> None:
        self._scheduler = scheduler
        self._extras = extras
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._newest: bytes | None = None  # None: nobody looks, or nothing was seen yet
        self._has_changed = asyncio.Event()  # another one for each frame
        self.is_closed = False  # for good

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """JSON objects, the newest first of all, until the caller leaves, or the feed is closed."""
        self._num_viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        shown: bytes | None = None
        try:
            while not self.is_closed:
                changed = self._has_changed
                if self._newest is not None and self._newest is not shown:
                    shown = self._newest
                    yield shown
                else:
                    await changed.wait()
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                await self._stop()

    def close(self) -> None:
        """Ends all streams of frames."""
        self.is_closed = True
        self._wake()

    async def _stop(self) -> None:
        task, self._task, self._newest = self._task, None, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        while True:
            try:
                await self._look_on()
            except RequestFailed as failure:
                if failure.code in REFUSALS:
                    self.close()
                    return
                self._publish({"problem": str(failure)})
            except Exception as fault:
                log.error("what a server does cannot be shown", exception=trace(fault))
                self._publish({"problem": "the gateway failed over it; its log says why"})
            await asyncio.sleep(RETRY_S)

    async def _look_on(self) -> None:
        """Until a look fails, or the steps break off. Raises RequestFailed."""
        tally, stepped = StepTally(), asyncio.Event()
        counting = asyncio.create_task(self._count(tally, stepped))
        counting.add_done_callback(lambda _: stepped.set())
        asked = pb.GetViewRequest(max_requests=MAX_REQUESTS, max_blocks=MAX_BLOCKS)
        try:
            while not counting.done():
                stepped.clear()
                view = await self._scheduler.view(asked)
                self._publish({**frame(view, tally.shown()), **self._extras})
                await asyncio.sleep(FRAME_S)
                await _is_set(stepped, QUIET_S)
            await counting
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    async def _count(self, tally: StepTally, stepped: asyncio.Event) -> None:
        async with aclosing(self._scheduler.watch_steps()) as steps:
            async for step in steps:
                tally.take(step)
                stepped.set()

    def _publish(self, content: dict[str, Any]) -> None:
        data = json.dumps(content, separators=(",", ":")).encode("ascii")
        if data != self._newest:
            self._newest = data
            self._wake()

    def _wake(self) -> None:
        changed, self._has_changed = self._has_changed, asyncio.Event()
        changed.set()


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    """Not by `wait_for`: in Python 3.11 a cancellation that comes as the event is set is lost there, and whoever was to
    stop looks on for ever."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False
