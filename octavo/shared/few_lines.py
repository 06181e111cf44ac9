"""A bound on the lines of a log that strangers cause: what costs them nothing is not to fill a disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

LINES_PER_S = 10


class FewLines:
    """Of one event. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._num, self._num_left_out = -math.inf, 0, 0

    def write(self, line: Callable[..., object], event: str, **fields: Any) -> None:
        """Calls `line` unless there were LINES_PER_S within this second; the next line says how many were left out."""
        now_s = self._clock()
        if now_s - self._since_s >= 1:
            self._since_s, self._num = now_s, 0
        self._num += 1
        if self._num > LINES_PER_S:
            self._num_left_out += 1
            return
        if self._num_left_out:
            fields["left_out"], self._num_left_out = self._num_left_out, 0
        line(event, **fields)
