"""How much may be in preparation at once: requests, and the bytes in which they came, counted from their arrival."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_svc.errors import QueueFull

RETRY_AFTER_S = 1.0
SMALL_BYTES = 16_384  # of a request that is tokenised in milliseconds
LARGE_SHARE = 0.75  # of the bytes, for requests above that: slow ones may fill it, and keep no small one out


class Admission:
    """For one thread. Beyond the bounds QueueFull is raised, at once: nothing waits here."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[None]:
        """While a request of so many bytes is prepared. One that is alone is taken whatever its size."""
        if self.num_requests >= self._max_requests:
            raise QueueFull(
                f"{self.num_requests} requests are prepared, at most {self._max_requests} may", RETRY_AFTER_S
            )
        most = self._max_bytes if num_bytes <= SMALL_BYTES else int(self._max_bytes * LARGE_SHARE)
        if self.num_requests and self.num_bytes + num_bytes > most:
            what = f"{self.num_bytes + num_bytes} bytes would be prepared, at most {most} may"
            raise QueueFull(what, RETRY_AFTER_S)
        self.num_requests += 1
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_bytes -= num_bytes
