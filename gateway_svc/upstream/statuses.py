"""What a scheduler's refusal is over HTTP: one table, and fields by the names that the body has for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import grpc

from gateway_svc import errors
from gateway_svc.errors import HttpError
from octavo.errors import RequestFailed

_OF_OPENAI = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}  # limits that its headers know
TOO_LONG = "PROMPT_TOO_LONG"  # a reason that schedulers give
_DEFAULT_RETRY_S = 1.0


class _Meaning(NamedTuple):
    status: int
    type: str
    code: str | None = None
    retries: bool = False  # a client is told when to try again


_Code = grpc.StatusCode
_UNANSWERED = _Meaning(503, errors.UNAVAILABLE, "unavailable", retries=True)
_MEANINGS: dict[grpc.StatusCode, _Meaning] = {
    _Code.INVALID_ARGUMENT: _Meaning(400, errors.INVALID),
    _Code.OUT_OF_RANGE: _Meaning(400, errors.INVALID),
    _Code.UNIMPLEMENTED: _Meaning(400, errors.INVALID, "unsupported_parameter"),
    _Code.FAILED_PRECONDITION: _Meaning(400, errors.INVALID, "unsupported_parameter"),
    _Code.UNAUTHENTICATED: _Meaning(401, errors.AUTHENTICATION, "invalid_api_key"),
    _Code.PERMISSION_DENIED: _Meaning(403, errors.PERMISSION),
    _Code.NOT_FOUND: _Meaning(404, errors.NOT_FOUND, "model_not_found"),
    _Code.ALREADY_EXISTS: _Meaning(409, errors.INVALID, "already_exists"),
    _Code.RESOURCE_EXHAUSTED: _Meaning(429, errors.RATE_LIMIT, "rate_limit_exceeded", retries=True),
    _Code.UNAVAILABLE: _UNANSWERED,
    _Code.CANCELLED: _UNANSWERED,  # see RequestFailed.is_unanswered
    _Code.DEADLINE_EXCEEDED: _Meaning(504, errors.SERVER, "timeout"),
}
_OTHERWISE = _Meaning(500, errors.SERVER)
_NAMED_FIRST = re.compile(r"(?:sampling_params\.)?([a-z_]+)\b")
_OF_REQUEST = ("model", "adapter", "priority", "request_id", "cache_salt")


def http_error(failure: RequestFailed, names: Mapping[str, str]) -> HttpError:
    """`names`: fields of the scheduler's messages to those of the body, where they differ."""
    meaning = _MEANINGS.get(failure.code, _OTHERWISE)
    if failure.is_too_large:
        meaning = _Meaning(413, errors.INVALID, "request_too_large")
    if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata size exceeds" in failure.message:
        meaning = _Meaning(431, errors.INVALID, "request_too_large")  # gRPC's own words, of a key that is none
    param = _param(failure, names)
    code = "context_length_exceeded" if failure.reason == TOO_LONG else meaning.code
    headers = (*_retry_headers(failure), *_limit_headers(failure)) if meaning.retries else ()
    message = _renamed(failure.message, names)
    return HttpError(meaning.status, message, type=meaning.type, param=param, code=code, headers=headers)


def _param(failure: RequestFailed, names: Mapping[str, str]) -> str | None:
    if failure.violations:
        return _name(failure.violations[0].field, names)
    if failure.code in (_Code.UNIMPLEMENTED, _Code.NOT_FOUND, _Code.ALREADY_EXISTS):
        found = _NAMED_FIRST.match(failure.message)
        if found and (found[0] != found[1] or found[1] in _OF_REQUEST):
            return _name(found[0], names)
    return None


def _name(field: str, names: Mapping[str, str]) -> str:
    """Of `sampling_params.stop[1]`: `stop[1]`."""
    bare = field.removeprefix("sampling_params.")
    name, bracket, rest = bare.partition("[")
    return names.get(name, name) + bracket + rest


def _renamed(message: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\bsampling_params\.([a-z_.]*[a-z_])", lambda found: names.get(found[1], found[1]), message)


def _retry_headers(failure: RequestFailed) -> tuple[tuple[str, str], ...]:
    """In whole seconds, as HTTP has it, and in milliseconds, which OpenAI's clients prefer."""
    seconds = failure.retry_after_s if failure.retry_after_s is not None else _DEFAULT_RETRY_S
    return ("retry-after", str(max(1, math.ceil(seconds)))), ("retry-after-ms", str(math.ceil(1e3 * seconds)))


def _limit_headers(failure: RequestFailed) -> tuple[tuple[str, str], ...]:
    """OpenAI's, of the limit that a tenant has reached."""
    what = _OF_OPENAI.get(failure.facts.get("limit", ""))
    if what is None:
        return ()
    most, left = failure.facts.get("most", ""), failure.facts.get("left", "")
    reset = f"{failure.retry_after_s or 0.0:.3f}s"
    return (
        (f"x-ratelimit-limit-{what}", most),
        (f"x-ratelimit-remaining-{what}", left),
        (f"x-ratelimit-reset-{what}", reset),
    )
