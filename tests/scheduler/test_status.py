"""How refusals become statuses when nobody is there to hear them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from scheduler_svc.api.status import refusals
from scheduler_svc.errors import NotReady


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
