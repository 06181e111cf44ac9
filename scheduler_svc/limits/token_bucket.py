"""A token bucket: so much a minute, and a minute's worth at once after a pause.

    level   rises by `per_minute` / 60 a second up to `per_minute`, and falls by what is taken.

Whoever asks first gets it where the level covers it, or where the bucket is full: a single request of more than a
minute's worth would wait for ever otherwise. What is charged afterwards may bring the level below 0, and is paid off
before anything is taken again. So in any window of `w` seconds no more is taken than

    per_minute + w * per_minute / 60 + the debt at its end.
"""

from __future__ import annotations

import math

_SLACK = 1e-6  # of one token: what rounding may cost somebody who comes exactly when he was told


class TokenBucket:
    """Times are seconds on any clock that rises; one that stands still or falls adds nothing."""

    __slots__ = ("_level", "_seen_s", "per_minute")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._seen_s = now_s

    def level(self, now_s: float) -> float:
        """What may be taken now; below 0 is a debt."""
        if now_s > self._seen_s:
            self._level = min(self.per_minute, self._level + (now_s - self._seen_s) * self.per_minute / 60)
            self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float, credit: float = 0.0) -> float:
        """Until so much can be taken, if nobody else comes; 0: now. In whole milliseconds, rounded up.

        credit: minutes' worth by which the level may be lower.
        """
        lacking = min(amount, self.per_minute) - self.level(now_s) - credit * self.per_minute
        return 0.0 if lacking <= _SLACK else math.ceil(lacking * 60_000 / self.per_minute) / 1e3

    def take(self, amount: float, now_s: float) -> None:
        """Takes it, whether it is there or not."""
        self._level = self.level(now_s) - amount

    def give_back(self, amount: float, now_s: float) -> None:
        """What was taken was of no use."""
        self._level = min(self.per_minute, self.level(now_s) + amount)

    def change(self, per_minute: float, now_s: float) -> None:
        """Another rate from now on. What has been taken stays taken, debts are kept."""
        level = self.level(now_s)
        self.per_minute = per_minute
        self._level = min(per_minute, level)
