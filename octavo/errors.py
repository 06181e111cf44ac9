"""What goes wrong for a Python caller, one small tree: what a server refused, what is no prompt, a worker
that ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc

_DETAILS_KEY = "grpc-status-details-bin"


class FieldViolation(NamedTuple):
    """One field of a request that the server does not accept."""

    field: str
    description: str


class OctavoError(Exception):
    """Base of what Octavo raises by itself."""


class InvalidPrompt(OctavoError, ValueError):
    """Not a prompt: one line that says which value, and what is accepted."""


class WorkerEnded(OctavoError, RuntimeError):
    """The worker beside an `LLM` has ended, or never began; its own last words are in the message."""


class Forked(OctavoError, RuntimeError):
    """What needs gRPC is used in a fork of a process that has used it."""


class RequestFailed(OctavoError):
    """A call that ended with another status than OK.

    `violations` names the fields of an INVALID_ARGUMENT; `retry_after_s` is the server's hint with RESOURCE_EXHAUSTED;
    `reason` is a word for programs, where the server gives one: PROMPT_TOO_LONG, or TENANT_LIMIT, of which `facts` say
    which limit it is.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        reason: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.facts = dict(facts or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Pools of processes bring errors back pickled. What `Exception` does makes one of the text alone.
        return type(self), (self.code, self.message), self.__dict__

    @property
    def is_unanswered(self) -> bool:
        """Nobody took the call: no server is there, or one stops, whose gRPC says CANCELLED to what comes just then."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    @property
    def is_too_large(self) -> bool:
        """A message was larger than its receiver takes, which gRPC itself says in these words: no attempt will pass."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in self.message

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> RequestFailed:
        """Reads status and details of what `grpc` or `grpc.aio` raised."""
        metadata = error.trailing_metadata() or ()
        details = next((value for key, value in metadata if key == _DETAILS_KEY), b"")
        return cls.from_details(error.code(), error.details() or "", details)

    @classmethod
    def from_details(cls, code: grpc.StatusCode, message: str, details: bytes) -> RequestFailed:
        """`details`: a serialised google.rpc.Status, empty where there is none."""
        return cls(code, message, *_read_details(details))


def _read_details(serialized: bytes) -> tuple[tuple[FieldViolation, ...], float | None, str, dict[str, str]]:
    if not serialized:
        return (), None, "", {}
    # Only a failed call pays for this import.
    from google.rpc import error_details_pb2, status_pb2

    violations: list[FieldViolation] = []
    retry_after_s, reason, facts = None, "", dict[str, str]()
    for detail in status_pb2.Status.FromString(serialized).details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
    return tuple(violations), retry_after_s, reason, facts
