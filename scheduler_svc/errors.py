"""Why a request is refused: a small tree, one class a kind of refusal. `status.py` maps it to gRPC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its name, and the value with what is accepted."""

    field: str
    description: str


class RequestRefused(Exception):
    """Base of all refusals. The message is meant for the client."""


class InvalidRequest(RequestRefused):
    """The request contradicts itself, the model or the limits; `is_too_long`: with a shorter prompt it would not."""

    def __init__(self, *violations: FieldViolation, is_too_long: bool = False) -> None:
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in violations))
        self.violations = violations
        self.is_too_long = is_too_long


class Unsupported(RequestRefused):
    """Valid, but this server cannot do it."""


class UnknownName(RequestRefused):
    """A model, adapter, request or worker that does not exist."""


class RequestTimeout(RequestRefused):
    """A call was begun, and its request did not come."""


class DuplicateRequest(RequestRefused):
    """A live request has this id already."""


class NameTaken(RequestRefused):
    """Something else is there under this name."""


class WorkerFailed(RequestRefused):
    """A worker could not do what was asked of all of them; it is named, with its own words."""


class QueueFull(RequestRefused):
    """The waiting queue is at its bound; `retry_after_s` is when trying again makes sense."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooMany(RequestRefused):
    """As many of these as there may be at once are there."""


class Unauthenticated(RequestRefused):
    """Nobody knows who asks."""


class NotAllowed(RequestRefused):
    """Whoever asks is known, and may not do this."""


class NotReady(RequestRefused):
    """There never was a worker, or the server drains."""
