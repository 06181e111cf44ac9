"""A frontend's side of the parent: which shards there are, and which request ids are free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.errors import NotReady
from scheduler_svc.frontends.outbox import Outbox

GONE = "this server is shutting down"


class FrontLink:
    """For one event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = shards_pb2_grpc.FrontStub(channel)
        self._outbox: Outbox[shards_pb2.FrontRequest] = Outbox()
        self._last_number = 0
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._is_closed = False

    async def follow(self, on_state: Callable[[shards_pb2.FrontState], Awaitable[None]]) -> None:
        """Takes what the parent says until it closes the link. Raises AioRpcError where it breaks."""
        call = self._stub.Connect(self._messages())
        try:
            async for message in call:
                for answer in message.answers:
                    if answer.HasField("state"):
                        await on_state(answer.state)
                    else:
                        self._take(answer.id)
        finally:
            call.cancel()
            self._is_closed = True
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(NotReady(GONE))

    async def claim(self, tenant: str, request_id: str) -> int | None:
        """The number of the claim, to be released; None: the id is live. Raises NotReady."""
        if self._is_closed:
            raise NotReady(GONE)
        self._last_number += 1
        number = self._last_number
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        claim = shards_pb2.IdClaim(number=number, tenant=tenant, request_id=request_id)
        self._outbox.put(shards_pb2.FrontRequest(claim=claim))
        try:
            return number if await answer else None
        except asyncio.CancelledError:
            self.release(number)
            raise
        finally:
            del self._answers[number]

    def release(self, number: int) -> None:
        """The request id that this number claimed is free again."""
        self._outbox.put(shards_pb2.FrontRequest(released=number))

    def say_listening(self, pid: int) -> None:
        """Tells the parent that clients can connect; `pid`: this process."""
        self._outbox.put(shards_pb2.FrontRequest(listening=pid))

    def _take(self, answer: shards_pb2.IdAnswer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(not answer.is_taken)
        elif not answer.is_taken:
            self.release(answer.number)  # it was given up while it waited for the id, and nobody else would do so

    async def _messages(self) -> AsyncIterator[shards_pb2.FrontRequests]:
        async for requests in self._outbox.batches():
            yield shards_pb2.FrontRequests(requests=requests)
