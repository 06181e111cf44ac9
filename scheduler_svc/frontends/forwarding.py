"""Calls that go on to another server as they came: bytes, metadata and deadline there, answers and status back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

A = TypeVar("A")
_OWN_KEYS = ("user-agent", "grpc-")  # metadata that the channel writes by itself


def forward(service: ServiceDescriptor, channel: grpc.aio.Channel, server: grpc.aio.Server) -> None:
    """Lets `server` answer every method of `service`, with one request or several answers, by asking `channel`."""
    handlers = {method.name: _handler(method, channel) for method in service.methods}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])


def _handler(method: MethodDescriptor, channel: grpc.aio.Channel) -> grpc.RpcMethodHandler:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(channel.unary_stream(path)), request_deserializer=bytes)
    return grpc.unary_unary_rpc_method_handler(_unary(channel.unary_unary(path)), request_deserializer=bytes)


def _unary(ask: Any) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            response: bytes = await ask(request, metadata=_metadata(context), timeout=context.time_remaining())
            return response
        except grpc.aio.AioRpcError as error:
            await _fail_alike(context, error)
        raise AssertionError("failed calls do not come here")

    return answer


def _streaming(ask: Any) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> None:
        call = ask(request, metadata=_metadata(context), timeout=context.time_remaining())
        try:
            async for response in call:
                await context.write(response)
        except grpc.aio.AioRpcError as error:
            await _fail_alike(context, error)
        finally:
            call.cancel()  # where the client is gone; does nothing to a call that has ended

    return answer


def _metadata(context: grpc.aio.ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    given = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in given if not key.startswith(_OWN_KEYS))


@asynccontextmanager
async def failing_alike(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Where another server fails the call it asks for, this one fails with the same status and the same words."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        await _fail_alike(context, error)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        await _fail_alike(context, _closed())


async def answer_of(call: Awaitable[A]) -> A:
    """The answer to one call. Raises AioRpcError, also where the call's channel is closed meanwhile.

    For that, gRPC cancels the call, and whoever awaits it gets a CancelledError that nobody meant for him. A servicer's
    method that ends with one sends no status: who has called it would wait for ever.
    """
    try:
        return await call
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        raise _closed() from None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closed() -> grpc.aio.AioRpcError:
    none, why = grpc.aio.Metadata(), "the link to it was closed meanwhile"
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, why)


async def _fail_alike(context: grpc.aio.ServicerContext, error: grpc.aio.AioRpcError) -> None:
    trailing = tuple((key, value) for key, value in error.trailing_metadata() or ())
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailing)
