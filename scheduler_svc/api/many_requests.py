"""`GenerateMany`: the requests of many clients over one call, and what is new of all of them in one message.

A message of gRPC costs as much CPU time as everything else that a token needs on its way out. Each request is answered
as `Generate` answers it, and refused by itself; the call ends for faults of its client alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import grpc
from grpc._cython import cygrpc  # the only place that has the error of a failed write

from protos import inference_pb2 as pb
from scheduler_svc.api.allowance import Allowance
from scheduler_svc.api.status import refusal_of
from scheduler_svc.errors import FieldViolation, InvalidRequest, QueueFull
from scheduler_svc.output.mailboxes import Box, Mailboxes
from scheduler_svc.output.request_stream import RequestStream

MAX_REQUESTS = 1024  # at once over one call
MAX_PARTS_A_MESSAGE = 64  # about a millisecond of the event loop
MAX_BYTES_A_MESSAGE = 262_144  # beyond them the next part is for the next message: plain clients take 4 MiB
MAX_NEWS = 4 * MAX_REQUESTS  # to be written; beyond, nothing more is read from a client that does not read either
IDLE_S = 30.0  # without a request, after which the call ends
QUICK_S = 0.25  # a request that its client gives up earlier has had no use of it
RETRY_AFTER_S = 1.0


class WayOut(Protocol):
    """How one request's answer is written."""

    def open(self, stream: RequestStream) -> None:
        """It is about to be submitted; `close` follows whatever becomes of it."""

    async def write_all(self, stream: RequestStream) -> None:
        """Returns after the last message. Raises CancelledError where its client is gone."""

    def close(self, stream: RequestStream) -> None:
        """What still comes is dropped."""


Answer = Callable[[pb.GenerateManyRequest, WayOut], Awaitable[None]]


class ManyRequests:
    """One call. For one event loop.

    Args:
        answer: prepares, submits and follows one request. Raises RequestRefused.
    """

    def __init__(self, answer: Answer, mailboxes: Mailboxes) -> None:
        self._answer = answer
        self._mailboxes = mailboxes
        self._live: dict[int, _OfMany] = {}  # by key
        self._last_key = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: deque[_OfMany | pb.GenerateManyResponse.Part] = deque()  # to be written, the oldest first
        self._woken = asyncio.Event()
        self._has_room = asyncio.Event()  # for news
        self._given_up = Allowance(time.monotonic())
        self._failure: Exception | None = None
        self._takes_more = True

    async def run(self, requests: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext) -> None:
        """Until the client sends no more and all have ended. Raises RequestRefused, for the call as a whole."""
        reading = asyncio.create_task(self._read(requests))
        try:
            while await self._have_news():
                if (message := self._next_message()).parts:
                    await context.write(message)
        except cygrpc.ExecuteBatchError:  # the client left while this waited to be read
            raise asyncio.CancelledError from None
        finally:
            for task in (reading, *self._tasks):
                task.cancel()

    def drain(self) -> None:
        """The call ends once its live requests have."""
        self._takes_more = False
        self._woken.set()

    def add_news(self, news: _OfMany | pb.GenerateManyResponse.Part) -> None:
        """A request that has a message to make, or a part that is made."""
        self._news.append(news)
        self._woken.set()

    async def _have_news(self) -> bool:
        """Waits for some; False: the call is over."""
        while not self._news:
            if self._failure is not None:
                raise self._failure
            if not self._live and not self._takes_more:
                return False
            self._woken.clear()
            try:
                async with asyncio.timeout(None if self._live else IDLE_S):
                    await self._woken.wait()
            except TimeoutError:
                if not self._live and not self._news:  # or one has begun meanwhile
                    return False
        return True

    def _next_message(self) -> pb.GenerateManyResponse:
        message, num_bytes = pb.GenerateManyResponse(), 0
        while self._news and len(message.parts) < MAX_PARTS_A_MESSAGE and num_bytes < MAX_BYTES_A_MESSAGE:
            news = self._news.popleft()
            if isinstance(news, _OfMany):
                if (response := news.take()) is None:
                    continue
                message.parts.add(key=news.key, response=response)
            else:
                message.parts.append(news)
            num_bytes += message.parts[-1].ByteSize()
        if len(self._news) < MAX_NEWS:
            self._has_room.set()
        return message

    # ---- what the client sends --------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        try:
            async for request in requests:
                self._take(request)
                if len(self._news) >= MAX_NEWS:
                    self._has_room.clear()
                    await self._has_room.wait()
        except Exception as error:
            self._failure = error
        self.drain()

    def _take(self, request: pb.GenerateManyRequest) -> None:
        kind, live = request.WhichOneof("kind"), self._live.get(request.key)
        if kind == "request":
            if request.key <= self._last_key:
                what = f"got {request.key} after {self._last_key}; accepted: a larger one with each request"
                raise InvalidRequest(FieldViolation("key", what))
            self._last_key = request.key
            self._begin(request)
        elif kind is None:
            raise InvalidRequest(FieldViolation("kind", "got none; accepted: request, hold or cancel"))
        elif live is None:
            pass  # it has ended meanwhile
        elif kind == "hold":
            live.hold(request.hold)
        else:
            self._cancel(live)

    def _begin(self, request: pb.GenerateManyRequest) -> None:
        key = request.key
        if len(self._live) >= MAX_REQUESTS:
            self._refuse(key, QueueFull(f"{MAX_REQUESTS} requests of this call are live", RETRY_AFTER_S))
            return
        if self._given_up.is_used_up(time.monotonic()):  # one of its clients does that; the others keep theirs
            self._refuse(key, QueueFull("requests of this call are begun and given up", RETRY_AFTER_S))
            return
        one = self._live[key] = _OfMany(key, self, self._mailboxes)
        task = asyncio.create_task(self._run_one(one, request))
        one.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, one: _OfMany) -> None:
        del self._live[one.key]
        assert one.task is not None
        one.task.cancel()
        now_s = time.monotonic()
        if now_s - one.began_s < QUICK_S:
            self._given_up.spend(now_s)

    async def _run_one(self, one: _OfMany, request: pb.GenerateManyRequest) -> None:
        try:
            await self._answer(request, one)
        except Exception as error:
            if one.key in self._live:
                self._refuse(one.key, error)
        finally:
            self._live.pop(one.key, None)
            self._woken.set()

    def _refuse(self, key: int, error: Exception) -> None:
        refusal = refusal_of(error)
        ending = pb.Ending(code=refusal.code.value[0], message=refusal.message, details=refusal.details)
        self.add_news(pb.GenerateManyResponse.Part(key=key, ending=ending))


class _OfMany:
    """One of the requests. A `WayOut`."""

    def __init__(self, key: int, call: ManyRequests, mailboxes: Mailboxes) -> None:
        self.key = key
        self.began_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self._call = call
        self._mailboxes = mailboxes
        self._box: Box | None = None
        self._is_due = self._is_held = False
        self._has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        self._box = self._mailboxes.open_shared(stream, self._on_due)

    async def write_all(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        assert self._box is not None
        if (admission := stream.admission()) is not None:
            self._call.add_news(pb.GenerateManyResponse.Part(key=self.key, response=admission))
        self._box.want()
        await self._has_ended

    def close(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        self._mailboxes.close(stream)
        self._box = None

    def hold(self, is_held: bool) -> None:
        """Its client wants no message for now, or again."""
        self._is_held = is_held
        if self._is_due and not is_held:
            self._call.add_news(self)

    def _on_due(self) -> None:
        self._is_due = True
        if not self._is_held:
            self._call.add_news(self)

    def take(self) -> pb.GenerateResponse | None:
        """Its next message; None where it has been made, has to wait, or is wanted no more."""
        if self._box is None or not self._is_due or self._is_held or self._has_ended.done():
            return None
        self._is_due = False
        try:
            response = self._box.take()
        except Exception as error:  # of ours, and of no other request
            self._has_ended.set_exception(error)
            return None
        if response.HasField("usage"):
            self._has_ended.set_result(None)
        else:
            self._box.want()
        return response
