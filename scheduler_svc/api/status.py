"""Refusals as gRPC statuses: one table, and the details that clients read by machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from octavo.shared import log as logging
from octavo.shared.few_lines import FewLines
from scheduler_svc.errors import (
    DuplicateRequest,
    InvalidRequest,
    NameTaken,
    NotAllowed,
    NotReady,
    QueueFull,
    RequestRefused,
    RequestTimeout,
    TooMany,
    Unauthenticated,
    UnknownName,
    Unsupported,
    WorkerFailed,
)
from scheduler_svc.limits.over_limit import OverLimit

log = structlog.get_logger()

STATUS_CODES: dict[type[RequestRefused], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    RequestTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    WorkerFailed: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OverLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
}
# With which gRPC ends a call: aborted, failed further on, or read after its server stopped (that has no public name).
ENDS_CALL = (grpc.aio.BaseError, grpc.RpcError)
FAULTS = (grpc.aio.UsageError, grpc.aio.InternalError)
MAX_TEXT_BYTES = 500
MAX_VIOLATIONS = 4  # in the details; the message names them all, as far as it goes
DOMAIN = "octavo.v1"
TOO_LONG = "PROMPT_TOO_LONG"  # with a shorter one the same request would be taken
TENANT_LIMIT = "TENANT_LIMIT"  # of the tenant, whatever others do
_strangers = FewLines()  # for the event loop that serves
DETAILS_KEY = "grpc-status-details-bin"  # as grpc defines it for google.rpc.Status


class Refusal(NamedTuple):
    """What a client is told; `details` is a serialised google.rpc.Status, empty where there is nothing to add."""

    code: grpc.StatusCode
    message: str
    details: bytes = b""


@asynccontextmanager
async def refusals(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turns an error into the status of a call, by `refusal_of`. What gRPC ends a call with goes on to it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ENDS_CALL) and not isinstance(error, FAULTS):
            raise
        await _abort(context, refusal_of(error))


def refusal_of(error: Exception) -> Refusal:
    """Of a RequestRefused what it means, of a fault of our own INTERNAL; only the log gets the traceback.

    What the client wrote goes back to it, and never into the log.
    """
    if isinstance(error, RequestRefused):
        code, message = STATUS_CODES[type(error)], _shortened(str(error))
        write = _strangers.write if isinstance(error, Unauthenticated) else _every_line
        write(log.info, "request refused", code=code.name, **_loggable(error))
        return Refusal(code, message, _details(code, message, error))
    log.error("request failed", exception=logging.trace(error))
    return Refusal(grpc.StatusCode.INTERNAL, "the server failed over this request; its log says why")


async def _abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> NoReturn:
    """Ends the call. It is no fault of ours where the client has not waited for that. Raises AbortError, or
    CancelledError, as grpc itself does, where nobody is left to be told."""
    metadata = ((DETAILS_KEY, refusal.details),) if refusal.details else ()
    try:
        await context.abort(refusal.code, refusal.message, trailing_metadata=metadata)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.debug("client is gone before its refusal")
        raise asyncio.CancelledError from None
    raise AssertionError("aborted calls do not come here")


def _every_line(line: Callable[..., object], event: str, **fields: object) -> None:
    line(event, **fields)


def _loggable(error: RequestRefused) -> dict[str, object]:
    """Why, but for what the client wrote: a message quotes what is wrong with a request, a field's name does not."""
    if isinstance(error, InvalidRequest):
        return {"fields": [violation.field.partition("[")[0] for violation in error.violations[:MAX_VIOLATIONS]]}
    quotes_nothing = isinstance(error, QueueFull | TooMany | NotReady | RequestTimeout | Unauthenticated | NotAllowed)
    return {"why": str(error) if quotes_nothing else type(error).__name__}


def _shortened(text: str) -> str:
    """Status and details are sent as headers, of which HTTP/2 peers take 8 KiB: what a client wrote may be longer."""
    data = text.encode()
    return text if len(data) <= MAX_TEXT_BYTES else f"{data[:MAX_TEXT_BYTES].decode(errors='ignore')} ..."


def _details(code: grpc.StatusCode, message: str, error: RequestRefused) -> bytes:
    status = status_pb2.Status(code=code.value[0], message=message)
    if isinstance(error, InvalidRequest):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=_shortened(violation.description)
            )
            for violation in error.violations[:MAX_VIOLATIONS]
        ]
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
        if error.is_too_long:
            status.details.append(_packed(error_details_pb2.ErrorInfo(reason=TOO_LONG, domain=DOMAIN)))
    elif isinstance(error, QueueFull):
        delay = duration_pb2.Duration(nanos=0)
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        if isinstance(error, OverLimit):
            status.details.extend(map(_packed, _limit_details(error)))
    details: bytes = status.SerializeToString()
    return details


def _limit_details(error: OverLimit) -> tuple[Message, Message]:
    """Which limit, for people's tools and for programs: the gateway makes OpenAI's headers of it."""
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=f"tenant:{error.tenant}", description=f"{error.limit} is {error.most}, {error.left} are left"
    )
    metadata = {"tenant": error.tenant, "limit": error.limit, "most": str(error.most), "left": str(error.left)}
    info = error_details_pb2.ErrorInfo(reason=TENANT_LIMIT, domain=DOMAIN, metadata=metadata)
    return error_details_pb2.QuotaFailure(violations=[violation]), info


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
