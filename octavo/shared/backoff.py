"""How long to wait before the next try of what has failed."""

from __future__ import annotations


def backoff_s(first_s: float, num_failures: int, longest_s: float) -> float:
    """Seconds: `first_s` after one failure, twice as many after each further one in a row, `longest_s` at most."""
    return min(first_s * 2.0 ** min(num_failures - 1, 32), longest_s)  # 2.0 ** 1024 raises
