"""What every call passes before its method, so that the method has only to raise.

Refusals, bytes that are no message, and faults of our own become statuses. Without it grpc answers all of them with
UNKNOWN and the text of a Python exception. Calls are counted from their first byte: a method that takes one message is
registered as if it took a stream, as grpc would otherwise say nothing of a call before its message is whole.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from scheduler_svc.errors import FieldViolation, InvalidRequest, RequestRefused, RequestTimeout, Unsupported
from scheduler_svc.open_calls import Call, OpenCalls
from scheduler_svc.request_reader import parse
from scheduler_svc.status import refusals

Read = Callable[[bytes], Any]
Behave = Callable[..., Any]

READ_TIMEOUT_S = 30.0  # for the one message of a call
REFUSED = (RequestRefused, grpc.aio.AbortError)  # by us: whoever is told so has not given up


class RequestGuard(grpc.aio.ServerInterceptor):
    """Wraps every method that is a coroutine or an asynchronous generator.

    Args:
        calls: counts them; None where all callers are trusted.
    """

    def __init__(self, calls: OpenCalls | None = None) -> None:
        self._calls = calls or OpenCalls(max_calls=2**31, cut=lambda peer: False)
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method; only such as exist
        self._unknown = grpc.stream_stream_rpc_method_handler(self._refuse_unknown)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if (guarded := self._guarded.get(details.method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is None:
            return self._unknown
        self._guarded[details.method] = guarded = self._guard(handler, details.method)
        return guarded

    async def _refuse_unknown(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with refusals(context):
            with self._calls.open(context.peer()):
                raise Unsupported("there is no such method")

    def _guard(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        behave = _behaviour(handler)
        guarded: Any
        if inspect.isasyncgenfunction(behave):
            guarded = self._guarded_generator(behave, self._reader(handler, method))
        elif inspect.iscoroutinefunction(behave):
            guarded = self._guarded_coroutine(behave, self._reader(handler, method))
        else:
            return handler
        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        # Messages of a stream are read wherever the method asks for one.
        deserialize = partial(parse, handler.request_deserializer, method=method) if handler.request_streaming else None
        return wrap(guarded, request_deserializer=deserialize, response_serializer=handler.response_serializer)

    def _guarded_coroutine(self, behave: Behave, read: _Reader) -> Behave:
        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with refusals(context):
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

    def _guarded_generator(self, behave: Behave, read: _Reader) -> Behave:
        async def guarded(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with refusals(context):
                with self._calls.open(context.peer()) as call:
                    try:
                        async for response in behave(await read(requests, context, call), context):
                            yield response
                    except REFUSED:
                        call.is_useful = call.has_request and not context.cancelled()
                        raise
                    call.is_useful = True

        return guarded

    @staticmethod
    def _reader(handler: grpc.RpcMethodHandler, method: str) -> _Reader:
        deserialize = handler.request_deserializer or _as_it_is

        async def read_stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, call: Call) -> Any:
            call.has_request = True
            return requests

        async def read_one(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, call: Call) -> Any:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    data = await context.read()
            except TimeoutError:
                raise RequestTimeout(f"the request was not here within {READ_TIMEOUT_S:g} s") from None
            if data is grpc.aio.EOF:
                raise InvalidRequest(FieldViolation("request", f"got none; accepted: one of {method}"))
            call.has_request = True
            return parse(deserialize, data, method)

        return read_stream if handler.request_streaming else read_one


_Reader = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext, Call], Awaitable[Any]]


def _behaviour(handler: grpc.RpcMethodHandler) -> Behave:
    by_kind = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }
    return by_kind[handler.request_streaming, handler.response_streaming]


def _as_it_is(data: bytes) -> bytes:
    return data
