"""A gRPC proxy in front of a worker that reads every message of the step stream and lets a test act on it.

All methods go through as bytes, so the scheduler talks to the real worker behind it; statuses are handed on. For an
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from octavo.shared.rpc import WORKER_CHANNEL_OPTIONS, WORKER_SERVER_OPTIONS
from protos import worker_pb2
from tests.chaos.step_tracker import Drawn, StepTracker

EXECUTE = "/octavo.v1.Worker/Execute"


class Watcher(Protocol):
    """Sees steps and results before they are handed on, and again right after; what it does happens there and then."""

    def on_step(self, proxy: StepProxy, step: worker_pb2.Step) -> None: ...

    def on_step_sent(self, proxy: StepProxy, step: worker_pb2.Step) -> None: ...

    def on_result(self, proxy: StepProxy, drawn: list[Drawn]) -> None: ...

    def on_result_sent(self, proxy: StepProxy, drawn: list[Drawn]) -> None: ...


class StepProxy:
    """Listens on a free port and hands every call on to the worker at `target_port`.

    Attributes:
        tracker: of the stream that was opened last.
        watcher: is told of steps and results; None: nobody.
        result_delay_s: a slow worker: each of its results takes so much longer.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.tracker = StepTracker()
        self.watcher: Watcher | None = None
        self.result_delay_s = 0.0
        self._server = grpc.aio.server(options=WORKER_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_AnyMethod(self),))
        self._channel = _channel(target_port)

    async def start(self) -> None:
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(grace=None)
        await self._channel.close()

    async def point_to(self, target_port: int) -> None:
        """Another process takes the worker's place at this address; calls to the old one end."""
        old, self._channel = self._channel, _channel(target_port)
        await old.close()

    async def forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        tracker = StepTracker()
        if method == EXECUTE:
            self.tracker = tracker
        call = self._channel.stream_stream(method)()
        sending = asyncio.create_task(self._send(method, requests, call, tracker))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                drawn = await self._drawn(data, tracker) if method == EXECUTE else None
                if drawn is not None and self.watcher:
                    self.watcher.on_result(self, drawn)
                await context.write(data)
                if drawn is not None and self.watcher:
                    self.watcher.on_result_sent(self, drawn)
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if context.cancelled() or not call.done():
                raise
            code, details = grpc.StatusCode.UNAVAILABLE, "the worker's place was taken"
        finally:
            sending.cancel()
            call.cancel()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details or "")

    async def _send(self, method: str, requests: AsyncIterator[bytes], call: Any, tracker: StepTracker) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # how a call ends is read elsewhere
            async for data in requests:
                step = None
                if method == EXECUTE:
                    message = worker_pb2.StepRequest.FromString(data)
                    if message.HasField("step"):
                        step = message.step
                        tracker.sent(step)
                        if self.watcher:
                            self.watcher.on_step(self, step)
                await call.write(data)
                if step is not None and self.watcher:
                    self.watcher.on_step_sent(self, step)
            await call.done_writing()

    async def _drawn(self, data: bytes, tracker: StepTracker) -> list[Drawn] | None:
        """The draws that a message brings; None where it is no result."""
        message = worker_pb2.StepResponse.FromString(data)
        if not message.HasField("result"):
            return None
        if self.result_delay_s:
            await asyncio.sleep(self.result_delay_s)
        return tracker.answered(message.result)


class _AnyMethod(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Every method as a stream of bytes both ways, which on the wire is what the others are, too."""

    def __init__(self, proxy: StepProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._proxy.forward(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(forward)


def _channel(port: int) -> grpc.aio.Channel:
    options = [
        *WORKER_CHANNEL_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
