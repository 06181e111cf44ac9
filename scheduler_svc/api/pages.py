"""Long answers come in pages: how many entries one may have, and where the next one begins."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.errors import FieldViolation, InvalidRequest


class PagedRequest(Protocol):
    """A request message with `optional uint32 page_size` and `string page_token`."""

    page_size: int
    page_token: str

    def HasField(self, field_name: str, /) -> bool:
        """As protobuf's."""


def page_size(request: PagedRequest, default: int, most: int) -> int:
    """Entries that the client wants at once. Raises InvalidRequest."""
    if not request.HasField("page_size"):
        return default
    if not 1 <= request.page_size <= most:
        raise InvalidRequest(FieldViolation("page_size", f"got {request.page_size}; accepted: 1 to {most}"))
    return request.page_size


def bad_token(what: str = "got something else") -> InvalidRequest:
    """What to raise for a page token that no answer can have had."""
    return InvalidRequest(FieldViolation("page_token", f"{what}; accepted: the next_page_token of an answer, or none"))
