"""Seeds of requests that bring none: from the seed of a whole run, or drawn."""

from __future__ import annotations

import hashlib
import secrets
import threading


class RequestSeeds:
    """Request number k (from 0, counting all) of a run with seed s gets the first 8 bytes of SHA-256 of "s/k".

    Little-endian, as an unsigned number. Without a seed each is drawn from the system's randomness. Thread-safe.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._num_taken = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """The seeds of the next `count` requests, which no other thread comes between."""
        with self._lock:
            first = self._num_taken
            self._num_taken += count
        return [self._of(number) for number in range(first, first + count)]

    def _of(self, number: int) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{number}".encode()).digest()[:8], "little")
