"""A frontend's side of the parent: which shards there are, which request ids are free, and whose limits are reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import FieldViolation, InvalidRequest, NotReady
from scheduler_svc.frontends.frontend_messages import decode_over_limit
from scheduler_svc.frontends.outbox import Outbox

GONE = "this server is shutting down"


class AbortedOnItsWay(Exception):
    """A request was ended before a shard had it."""


class FrontLink:
    """For one event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = shards_pb2_grpc.FrontStub(channel)
        self._outbox: Outbox[shards_pb2.FrontRequest] = Outbox()
        self._last_number = 0
        self._answers: dict[int, asyncio.Future[bool]] = {}  # to claims, questions whether one was aborted, and echoes
        self._claims: dict[int, SequenceGroup] = {}  # that were sent, until they are refused or released
        self._is_closed = False

    async def follow(
        self,
        on_state: Callable[[shards_pb2.FrontState], Awaitable[None]],
        on_abort: Callable[[SequenceGroup], bool],
    ) -> None:
        """Takes what the parent says until it closes the link. Raises AioRpcError where it breaks.

        `on_abort` ends the request of a claim, and says whether it was there to be ended.
        """
        call = self._stub.Connect(self._messages())
        try:
            async for message in call:
                for answer in message.answers:
                    if answer.HasField("state"):
                        await on_state(answer.state)
                    elif answer.HasField("aborted"):
                        self._settle(answer.aborted.number, answer.aborted.found)
                    elif answer.HasField("abort_claim"):
                        group = self._claims.get(answer.abort_claim)
                        is_found = group is not None and on_abort(group)
                        self._outbox.put(shards_pb2.FrontRequest(aborted=is_found))
                    elif answer.HasField("echo"):
                        self._settle(answer.echo, True)
                    else:
                        self._take(answer.id)
        finally:
            call.cancel()
            self._is_closed = True
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(NotReady(GONE))

    async def claim(self, group: SequenceGroup) -> int | None:
        """The number of the claim, to be released; None: the id is live. Returns when the tenant may run it.

        Raises NotReady, OverLimit, InvalidRequest, and AbortedOnItsWay.
        """
        number, answer = self._ask()
        claim = shards_pb2.IdClaim(
            number=number,
            tenant=group.tenant,
            request_id=group.request_id,
            num_prompt_tokens=group.num_prompt_tokens + group.num_resumed_tokens,
            num_sequences=group.best_of,
            num_bytes=group.num_bytes,
        )
        self._outbox.put(shards_pb2.FrontRequest(claim=claim))
        self._claims[number], is_granted = group, False
        try:
            is_granted = await answer
            return number if is_granted else None
        except asyncio.CancelledError:
            self.release(number)
            raise
        finally:
            del self._answers[number]
            if not is_granted:
                self._claims.pop(number, None)

    async def check_limits(self, tenant: str, request_id: str, num_bytes: int) -> None:
        """Raises OverLimit where a request of so many bytes would be refused whatever else is in it, and NotReady."""
        number, answer = self._ask()
        asked = shards_pb2.IdClaim(number=number, tenant=tenant, request_id=request_id, num_bytes=num_bytes)
        self._outbox.put(shards_pb2.FrontRequest(check=asked))
        try:
            await answer
        finally:
            del self._answers[number]

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """Ends live requests of this id, at any frontend, held or not; whether there were any. Raises NotReady."""
        number, answer = self._ask()
        abort = shards_pb2.IdAbort(number=number, request_id=request_id, tenant=tenant)
        self._outbox.put(shards_pb2.FrontRequest(abort=abort))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def catch_up(self) -> None:
        """Returns once all is here that the parent has told anybody by now. Raises NotReady."""
        number, answer = self._ask()
        self._outbox.put(shards_pb2.FrontRequest(echo=number))
        try:
            await answer
        finally:
            del self._answers[number]

    def _ask(self) -> tuple[int, asyncio.Future[bool]]:
        """A number for a question, and what becomes of it. Raises NotReady."""
        if self._is_closed:
            raise NotReady(GONE)
        self._last_number += 1
        answer = self._answers[self._last_number] = asyncio.get_running_loop().create_future()
        return self._last_number, answer

    def release(self, number: int) -> None:
        """The request id that this number claimed is free again."""
        self._claims.pop(number, None)
        self._outbox.put(shards_pb2.FrontRequest(released=number))

    def refuse(self, number: int) -> None:
        """As `release`, for a request that was never taken."""
        self._claims.pop(number, None)
        self._outbox.put(shards_pb2.FrontRequest(refused=number))

    def use(self, number: int, num_tokens: int) -> None:
        """So many tokens were generated for the request, all told."""
        self._outbox.put(shards_pb2.FrontRequest(used=shards_pb2.ClaimUse(number=number, num_tokens=num_tokens)))

    def say_listening(self, pid: int) -> None:
        """Tells the parent that clients can connect; `pid`: this process."""
        self._outbox.put(shards_pb2.FrontRequest(listening=pid))

    def _take(self, answer: shards_pb2.IdAnswer) -> None:
        waiting = self._answers.get(answer.number)
        is_void = answer.is_taken or answer.is_aborted or answer.HasField("over_limit")
        is_void = is_void or bool(answer.too_many_sequences)
        if waiting is None or waiting.done():
            if not is_void:
                self.release(answer.number)  # it was given up while it waited for the id, and nobody else would do so
        elif answer.HasField("over_limit"):
            waiting.set_exception(decode_over_limit(answer.over_limit))
        elif answer.too_many_sequences:
            waiting.set_exception(InvalidRequest(FieldViolation("sampling_params.best_of", answer.too_many_sequences)))
        elif answer.is_aborted:
            waiting.set_exception(AbortedOnItsWay)
        else:
            waiting.set_result(not answer.is_taken)

    def _settle(self, number: int, result: bool) -> None:
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    async def _messages(self) -> AsyncIterator[shards_pb2.FrontRequests]:
        async for requests in self._outbox.batches():
            yield shards_pb2.FrontRequests(requests=requests)
