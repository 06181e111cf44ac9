"""What every unary request passes before its method, so that the method has only to raise.

Refusals, bytes that are no message, and faults of our own become statuses. Without it grpc answers all of them with
UNKNOWN and the text of a Python exception.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.status import refusals

Read = Callable[[bytes], Any]


class RequestGuard(grpc.aio.ServerInterceptor):
    """Wraps every method that takes one message and is a coroutine or an asynchronous generator."""

    def __init__(self) -> None:
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method; only such as exist

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if (guarded := self._guarded.get(details.method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        self._guarded[details.method] = guarded = _guard(handler, details.method)
        return guarded


def _guard(handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    read = _reader(handler.request_deserializer, method)
    behave = handler.unary_stream if handler.response_streaming else handler.unary_unary
    wrap = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    guarded: Any
    if inspect.isasyncgenfunction(behave):
        guarded = _guarded_generator(behave, read)
    elif inspect.iscoroutinefunction(behave):
        guarded = _guarded_coroutine(behave, read)
    else:
        return handler
    return wrap(guarded, request_deserializer=None, response_serializer=handler.response_serializer)


def _guarded_coroutine(behave: Callable[..., Awaitable[Any]], read: Read) -> Callable[..., Awaitable[Any]]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        async with refusals(context):
            return await behave(read(data), context)

    return guarded


def _guarded_generator(behave: Callable[..., AsyncIterator[Any]], read: Read) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with refusals(context):
            async for response in behave(read(data), context):
                yield response

    return guarded


def _reader(deserialize: Read, method: str) -> Read:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest(
                FieldViolation("request", f"these {len(data)} bytes are no request of {method}: {error}")
            ) from None

    return read
