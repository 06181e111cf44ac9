"""Calls that go on to another server as they came: bytes, metadata and deadline there, answers and status back.

Some may take as long as requests run, so none is bounded by time. Whether the other server still answers anything is
asked meanwhile: a process that was stopped or has ended closes the channel, and one whose event loop hangs does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

A = TypeVar("A")
_OWN_KEYS = ("user-agent", "grpc-")  # metadata that the channel writes by itself
_CLOSED = "the link to it was closed meanwhile"
PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 20.0, 20.0  # while a call waits


def forward(service: ServiceDescriptor, channel: grpc.aio.Channel, server: grpc.aio.Server, probe: str) -> None:
    """Lets `server` answer every method of `service`, with one request or several answers, by asking `channel`.

    `probe`: a method that is answered at once as long as the other server answers anything; an empty message asks it.
    """
    ask = channel.unary_unary(_path(service.methods_by_name[probe]))
    handlers = {method.name: _handler(method, channel, ask) for method in service.methods}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])


def _handler(method: MethodDescriptor, channel: grpc.aio.Channel, probe: Any) -> grpc.RpcMethodHandler:
    if method.server_streaming:
        stream = _streaming(channel.unary_stream(_path(method)), probe)
        return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=bytes)
    return grpc.unary_unary_rpc_method_handler(
        _unary(channel.unary_unary(_path(method)), probe), request_deserializer=bytes
    )


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _unary(ask: Any, probe: Any) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        call = ask(request, metadata=_metadata(context), timeout=context.time_remaining())
        async with failing_alike(context), _ending_when_silent(call, probe):
            answered: bytes = await call
            return answered
        raise AssertionError("failed calls do not come here")

    return answer


def _streaming(ask: Any, probe: Any) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> None:
        call = ask(request, metadata=_metadata(context), timeout=context.time_remaining())
        async with failing_alike(context), _ending_when_silent(call, probe):
            async for response in call:
                await context.write(response)

    return answer


@asynccontextmanager
async def _ending_when_silent(call: Any, probe: Any) -> AsyncIterator[None]:
    """Cancels a call once the server that it goes to answers nothing at all, and at the end. Raises AioRpcError."""
    silence = ""

    async def watch() -> None:
        nonlocal silence
        while not silence:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                await probe(b"", timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    silence = f"the scheduler behind this one answered nothing for {PROBE_TIMEOUT_S:g} s"
                    call.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        if silence and not _is_cancelled():
            raise _unavailable(silence) from None
        raise
    finally:
        watching.cancel()
        call.cancel()  # where the client is gone; does nothing to a call that has ended


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
        await _fail_alike(context, _unavailable(_CLOSED))


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
        raise _unavailable(_CLOSED) from None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unavailable(why: str) -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, why)


async def _fail_alike(context: grpc.aio.ServicerContext, error: grpc.aio.AioRpcError) -> None:
    trailing = tuple((key, value) for key, value in error.trailing_metadata() or ())
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailing)
