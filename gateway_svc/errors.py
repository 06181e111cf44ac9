"""Why a request is not answered, as OpenAI's clients read it: a status, and an error with type, parameter and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INVALID, AUTHENTICATION, PERMISSION, NOT_FOUND = (
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
)
RATE_LIMIT, UNAVAILABLE, SERVER = "rate_limit_error", "service_unavailable_error", "server_error"


class HttpError(Exception):
    """The message is for the client. `param` is the field that is wrong, `code` what programs look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = tuple(headers)

    def body(self) -> Mapping[str, Any]:
        """The JSON object that says so."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class InvalidField(HttpError):
    """One field: what is wrong with it, and what is accepted."""

    def __init__(self, param: str, what: str, *, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {what}", param=param, code=code)


class UnsupportedField(InvalidField):
    """Known, but not to this server."""

    def __init__(self, param: str, what: str) -> None:
        super().__init__(param, what, code="unsupported_parameter")
