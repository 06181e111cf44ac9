"""Requests that ended with an error, as lines of the log: one a second at most, however many there are."""

from __future__ import annotations

import structlog

log = structlog.get_logger()

INTERVAL_NS = 1_000_000_000  # between two lines
MAX_IDS = 8  # request ids in a line
MAX_REASONS = 3  # different ones in a line


class FailedRequests:
    """Collects what ends with an error, and writes it down when it is told the time. For one thread."""

    def __init__(self) -> None:
        self._num_ended = 0
        self._first: list[str] = []
        self._reasons: list[str] = []
        self._written_ns: int | None = None

    def note(self, request_id: str, reason: str) -> None:
        """A request has ended with an error; `reason` is what its client is told."""
        self._num_ended += 1
        if len(self._first) < MAX_IDS:
            self._first.append(request_id)
        if len(self._reasons) < MAX_REASONS and reason not in self._reasons:
            self._reasons.append(reason)

    def look(self, now_ns: int) -> None:
        """Writes the line that is due. Costs next to nothing while there is none."""
        if self._num_ended and (self._written_ns is None or now_ns - self._written_ns >= INTERVAL_NS):
            self._written_ns = now_ns
            self.write()

    def write(self) -> None:
        """Writes what there is at once: the last line, before the thread ends."""
        if self._num_ended:
            what = "requests ended with an error"
            log.warning(what, requests=self._num_ended, first=self._first, why="; ".join(self._reasons))
            self._num_ended, self._first, self._reasons = 0, [], []
