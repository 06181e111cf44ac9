"""How often something may happen: so often at once, and so often a second for long."""

from __future__ import annotations

AT_ONCE = 1000  # calls that a client may begin and give up,
PER_S = 100  # and for long


class Allowance:
    """Of one client. `used_s` is when something of it was spent last, or it began."""

    __slots__ = ("_left", "used_s")

    def __init__(self, now_s: float) -> None:
        self._left = float(AT_ONCE)
        self.used_s = now_s

    def spend(self, now_s: float) -> bool:
        """Once; False where it was used up before."""
        left = self._left_at(now_s) - 1
        self._left, self.used_s = max(0.0, left), now_s
        return left >= 0

    def is_used_up(self, now_s: float) -> bool:
        """Whether nothing could be spent."""
        return self._left_at(now_s) < 1

    def _left_at(self, now_s: float) -> float:
        return min(AT_ONCE, self._left + (now_s - self.used_s) * PER_S)
