"""Bodies of requests: JSON of a bounded size, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive

from gateway_svc import errors
from gateway_svc.errors import HttpError


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read_json(headers: Headers, receive: Receive, max_bytes: int) -> Any:
    """Raises HttpError, ClientGone."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site could send anything else without asking first
        raise HttpError(415, f"the content-type is {kind[:80]!r}; accepted: application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "a compressed body is not taken")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        _too_large(max_bytes)
    parts, size = [], 0
    while True:
        try:
            message = await receive()
        except asyncio.CancelledError:
            raise shutting_down() from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            _too_large(max_bytes)
        if not message.get("more_body"):
            break
    try:
        return json.loads(b"".join(parts), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8, and of 4,300 digits
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HttpError(400, f"the body is no JSON: {why[:200]}", code="invalid_json") from None


def shutting_down() -> HttpError:
    """Of what has not ended when the service does."""
    return HttpError(503, "the gateway is shutting down", type=errors.UNAVAILABLE, code="unavailable")


def _too_large(max_bytes: int) -> NoReturn:
    what = f"the body is too large; accepted: at most {max_bytes} bytes (--max-body-bytes)"
    # What is still to come is not read: the connection ends with this.
    raise HttpError(413, what, code="request_too_large", headers=(("connection", "close"),))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
