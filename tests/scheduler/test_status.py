"""How refusals become statuses when nobody is there to hear them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from octavo.errors import RequestFailed
from scheduler_svc.api.status import refusals
from scheduler_svc.errors import FieldViolation, InvalidRequest, NotReady
from scheduler_svc.requests.frames import decode_refusal, encode_refusal


class _Gone:
    """The context of a call whose client has left: gRPC cannot send a status any more."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        self.codes.append(code)
        raise RuntimeError("Failed to send the status")


@pytest.mark.parametrize("error", [NotReady("draining"), ZeroDivisionError()])
async def test_a_client_that_is_gone_is_no_fault_of_ours(error: Exception) -> None:
    """Neither tried twice nor logged as one; a fault that was there before is logged once."""
    context = _Gone()
    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        async with refusals(context):
            raise error
    assert len(context.codes) == 1
    errors = [line for line in logs if line["log_level"] == "error"]
    assert len(errors) == isinstance(error, ZeroDivisionError)


async def test_a_call_that_reads_when_its_server_has_stopped_is_no_fault_of_ours() -> None:
    begun, stopped, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read_late(requests: Any, context: Any) -> Any:
        begun.set()
        try:
            with suppress(asyncio.CancelledError):  # its call ends with the server; it goes on a little
                await stopped.wait()
            await stopped.wait()
            async with refusals(context):
                return await context.read()
        finally:
            ended.set()

    server = grpc.aio.server()
    methods = {"Echo": grpc.stream_unary_rpc_method_handler(read_late)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_unary("/test.Echo/Echo")()
            await begun.wait()
            await server.stop(None)
            stopped.set()
            await ended.wait()
            call.cancel()
    assert not [line for line in logs if line["log_level"] == "error"]


class _Told:
    """The context of a call whose client hears."""

    failure: RequestFailed

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        trailing = grpc.aio.Metadata(*trailing_metadata)
        self.failure = RequestFailed.from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))
        raise grpc.aio.AbortError


@pytest.mark.parametrize(("is_too_long", "reason"), [(True, "PROMPT_TOO_LONG"), (False, "")])
async def test_a_prompt_that_is_too_long_says_so_to_programs(is_too_long: bool, reason: str) -> None:
    refusal = InvalidRequest(FieldViolation("prompt", "9 tokens are too many"), is_too_long=is_too_long)
    context: Any = _Told()
    with pytest.raises(grpc.aio.AbortError):
        async with refusals(context):
            raise decode_refusal(encode_refusal(refusal))  # as it comes from a text process
    assert context.failure.reason == reason and context.failure.violations[0].field == "prompt"
