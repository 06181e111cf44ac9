"""What runs before every method of a service, so that a method only has to raise.

Refusals, bytes that are no message, and faults of our own become statuses. Without this, gRPC answers all of them with
UNKNOWN and the text of a Python exception. Calls are counted from their first byte: a method that takes one message is
registered as if it took a stream, because gRPC otherwise reports a call only when its message is whole.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import structlog

from octavo.shared.rpc import behaviour
from octavo.shared.watched_files import LOOK_AGAIN_S
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.open_calls import Call, OpenCalls
from scheduler_svc.api.status import refusals
from scheduler_svc.errors import FieldViolation, InvalidRequest, QueueFull, RequestRefused, RequestTimeout, Unsupported
from scheduler_svc.requests.request_reader import parse

Read = Callable[[bytes], Any]
Behave = Callable[..., Any]

READ_TIMEOUT_S = 30.0  # for the one message of a call, or the next one of several
SLOWEST_BYTES_PER_S = 36_000  # at which a message of the largest size that is taken may come
RETRY_AFTER_S = 1.0
LARGE = frozenset(f"/octavo.v1.Inference/{name}" for name in ("Generate", "Tokenize", "Detokenize"))  # not read here
MAX_OTHER_BYTES = 65_536  # of a request that is read here, on the event loop: 2 ms for the worst bytes
PATIENT = frozenset({"/octavo.v1.Inference/GenerateMany"})  # decide themselves how long they wait for the next message
GIVES_WAY = frozenset({"/grpc.health.v1.Health/Watch"})  # may stay open for ever, while nobody else needs its place
ENDLESS = frozenset({"/octavo.v1.Control/WatchSteps"})  # need their key for as long as they last
# A call that is refused while its client still writes may end there with INTERNAL: grpc.aio's clients give a write that
# fails as the call ends a status of their own. So what comes at once is read, and dropped, before a call is refused.
HEAR_S, HEAR_MORE_S = 0.25, 0.05  # that its first message, and each of those after it, is waited for
MAX_HEARD = 64  # messages of one call, and calls at once: a stranger is not to make this server read much
REFUSED = (RequestRefused, grpc.aio.AbortError)  # by us: whoever is told so has not given up


class RequestGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Wraps every method that is a coroutine or an asynchronous generator.

    Args:
        calls: counts them; None where all callers are trusted.
        authority: says who may call what; None: everybody everything.
        read_timeout_s: for each message that is awaited; None: no bound.
    """

    def __init__(
        self,
        calls: OpenCalls | None = None,
        read_timeout_s: float | None = None,
        authority: Authority | None = None,
    ) -> None:
        self._authority = authority
        self._calls = calls or OpenCalls(max_calls=2**31, cut=lambda peer: False)
        self._trusts_callers = calls is None
        self._read_timeout_s = read_timeout_s
        self._num_hearing = 0
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method; only such as exist
        self._unknown = grpc.stream_stream_rpc_method_handler(self._refuse_unknown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wraps a method when it is first called, and keeps the wrapped one. Who may not call it is refused."""
        if self._authority is not None:
            try:
                self._authority.check(details.method, details.invocation_metadata)
            except RequestRefused as refusal:
                return grpc.stream_stream_rpc_method_handler(partial(self._refuse, refusal))
        if (guarded := self._guarded.get(details.method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is None:
            return self._unknown
        self._guarded[details.method] = guarded = self._guard(handler, details.method)
        return guarded

    async def _refuse_unknown(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await self._refuse(Unsupported("there is no such method"), requests, context)

    async def _refuse(
        self, refusal: RequestRefused, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        async with refusals(context):
            with self._calls.open(context.peer()) as call:
                await self._hear(context)
                try:
                    with structlog.contextvars.bound_contextvars(peer=context.peer()):
                        async with refusals(context):
                            raise refusal
                except grpc.aio.AbortError:
                    # It waited for that: else wrong keys that come through a proxy cut the connection of all others.
                    call.is_useful = True
                    raise

    async def _hear(self, context: grpc.aio.ServicerContext) -> None:
        """Reads what a client writes at once to a call that is about to be refused."""
        if self._num_hearing >= MAX_HEARD:
            return
        self._num_hearing += 1
        try:
            wait_s = HEAR_S
            num_bytes = 0
            for _ in range(MAX_HEARD):
                async with asyncio.timeout(wait_s):
                    if (message := await context.read()) is grpc.aio.EOF:
                        return
                num_bytes += len(message)
                if num_bytes > MAX_OTHER_BYTES:
                    return
                wait_s = HEAR_MORE_S
        except TimeoutError:
            pass  # it has all its time before the next one
        finally:
            self._num_hearing -= 1

    def _guard(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        behave = behaviour(handler)
        guarded: Any
        if inspect.isasyncgenfunction(behave):
            guarded = self._guarded_generator(behave, self._reader(handler, method), method)
        elif inspect.iscoroutinefunction(behave):
            guarded = self._guarded_coroutine(behave, self._reader(handler, method), method)
        else:
            return handler
        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        # Messages of a stream are read wherever the method asks for one.
        deserialize = self._parser(handler, method) if handler.request_streaming else None
        return wrap(guarded, request_deserializer=deserialize, response_serializer=handler.response_serializer)

    def _guarded_coroutine(self, behave: Behave, read: _Reader, method: str) -> Behave:
        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with refusals(context), self._while_allowed(method, context):
                with self._calls.open(context.peer()) as call:
                    # The request belongs to the method alone: whoever holds it here does so for the call's whole life.
                    try:
                        response = await behave(await read(requests, context, call), context)
                    except REFUSED:
                        call.is_useful = call.has_request and not context.cancelled()
                        raise
                    call.is_useful = True
                    return response

        return guarded

    def _guarded_generator(self, behave: Behave, read: _Reader, method: str) -> Behave:
        gives_way = method in GIVES_WAY

        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with refusals(context), self._while_allowed(method, context):
                with self._calls.open(context.peer(), give_way=_cancel_this_task() if gives_way else None) as call:
                    try:
                        async for response in behave(await read(requests, context, call), context):
                            yield response
                    except asyncio.CancelledError:
                        if not call.has_given_way:
                            raise
                        raise QueueFull("others need the place of this call", RETRY_AFTER_S) from None
                    except REFUSED:
                        call.is_useful = call.has_request and not context.cancelled()
                        raise
                    call.is_useful = True

        return guarded

    @asynccontextmanager
    async def _while_allowed(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """A stream without an end does not outlive its key. Raises RequestRefused, on the way out."""
        if self._authority is None or method not in ENDLESS:
            yield
            return
        authority, metadata = self._authority, context.invocation_metadata()
        refused: list[RequestRefused] = []
        stop = _cancel_this_task()

        async def look() -> None:
            while not refused:
                await asyncio.sleep(LOOK_AGAIN_S)
                try:
                    authority.check(method, metadata)
                except RequestRefused as refusal:
                    refused.append(refusal)
                    stop()

        looking = asyncio.create_task(look())
        try:
            yield
        except asyncio.CancelledError:
            if refused:
                raise refused[0] from None
            raise
        finally:
            looking.cancel()

    def _reader(self, handler: grpc.RpcMethodHandler, method: str) -> _Reader:
        read = self._parser(handler, method)

        async def read_stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, call: Call) -> Any:
            call.has_request = True
            return requests if method in PATIENT else self._in_time(requests)

        async def read_one(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, call: Call) -> Any:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    data = await context.read()
            except TimeoutError:
                raise self._too_late() from None
            if data is grpc.aio.EOF:
                raise InvalidRequest(FieldViolation("request", f"got none; accepted: one of {method}"))
            call.has_request = True
            return read(data)

        return read_stream if handler.request_streaming else read_one

    def _parser(self, handler: grpc.RpcMethodHandler, method: str) -> Read:
        """Makes of bytes what the method takes. Raises InvalidRequest."""
        read = partial(parse, handler.request_deserializer or _as_it_is, method=method)
        if self._trusts_callers or method in LARGE:
            return read

        def read_small(data: bytes) -> Any:
            if len(data) > MAX_OTHER_BYTES:
                what = f"got {len(data)} bytes; accepted: at most {MAX_OTHER_BYTES} for {method}"
                raise InvalidRequest(FieldViolation("request", what))
            return read(data)

        return read_small

    async def _in_time(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    request = await anext(requests)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._too_late() from None
            yield request

    def _too_late(self) -> RequestTimeout:
        return RequestTimeout(f"no request was here within {self._read_timeout_s:g} s")


def read_timeout_s(max_request_bytes: int) -> float:
    """In which the largest request has to be here, however slow its client's line."""
    return max(READ_TIMEOUT_S, max_request_bytes / SLOWEST_BYTES_PER_S)


def _cancel_this_task() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


_Reader = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext, Call], Awaitable[Any]]


def _as_it_is(data: bytes) -> bytes:
    return data
