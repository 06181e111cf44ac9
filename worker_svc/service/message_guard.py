"""Bytes that are no message: INVALID_ARGUMENT for the sender, and one line in the log.

gRPC's own answer is INTERNAL, UNKNOWN for a stream, and a traceback in the log for each.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from octavo.shared.few_lines import FewLines
from octavo.shared.rpc import behaviour
from worker_svc.service.door import HEALTH, Door

log = structlog.get_logger()
_strangers = FewLines()  # for the event loop that serves

Read = Callable[[bytes], Any]
Behavior = Callable[..., Any]

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class _Malformed(Exception):
    """The message is for the client; it does not repeat the bytes."""


class MessageGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Wraps every method of a server, with one request or a stream of them, that is asynchronous and reads messages."""

    def __init__(self, door: Door | None = None) -> None:
        """`door`: who may call at all; None: everybody."""
        self._door = door or Door()
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}  # by method; only such as exist

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wraps a method when it is first called, and keeps the wrapped one. Who may not call it is refused unread."""
        if refusal := self._door.refusal(details.method, details.invocation_metadata):
            return grpc.stream_stream_rpc_method_handler(partial(_turn_away, refusal))
        if (guarded := self._guarded.get(details.method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        self._guarded[details.method] = guarded = _guard(handler, details.method, self._door)
        return guarded


def _guard(handler: grpc.RpcMethodHandler, method: str, door: Door) -> grpc.RpcMethodHandler:
    read = _reader(handler.request_deserializer, method)
    behave, make = behaviour(handler), _MAKERS[handler.request_streaming, handler.response_streaming]
    if not inspect.isasyncgenfunction(behave) and not inspect.iscoroutinefunction(behave):
        return handler
    wrap = _guarded_generator if inspect.isasyncgenfunction(behave) else _guarded_coroutine
    if handler.request_streaming:  # whose messages are read wherever the method asks for one
        return make(wrap(behave, lambda requests: requests, method, door), read, handler.response_serializer)
    return make(wrap(behave, read, method, door), None, handler.response_serializer)


def _guarded_coroutine(behave: Behavior, read: Read, method: str, door: Door) -> Behavior:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _look_at_peer(door, method, context)
        try:
            return await behave(read(request), context)
        except _Malformed as error:
            await _refuse(context, error, method)

    return guarded


def _guarded_generator(behave: Behavior, read: Read, method: str, door: Door) -> Behavior:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _look_at_peer(door, method, context)
        try:
            async for response in behave(read(request), context):
                yield response
        except _Malformed as error:
            await _refuse(context, error, method)

    return guarded


def _reader(deserialize: Read, method: str) -> Read:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise _Malformed(f"these {len(data)} bytes are no request of {method}: {error}") from None

    return read


async def _look_at_peer(door: Door, method: str, context: grpc.aio.ServicerContext) -> None:
    if not method.startswith(HEALTH) and (refusal := door.refusal_of_peer(context)):
        await _turn_away(refusal, None, context)


async def _turn_away(refusal: str, requests: object, context: grpc.aio.ServicerContext) -> NoReturn:
    _strangers.write(log.warning, "a call was turned away", peer=context.peer(), why=refusal)
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
    raise AssertionError("abort has raised")


async def _refuse(context: grpc.aio.ServicerContext, error: _Malformed, method: str) -> NoReturn:
    log.info("bytes that are no message", method=method)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort has raised")
