"""Progress of loading weights: a bar on a terminal, nothing in log files."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from octavo.shared.log import is_terminal

GIB = 1 << 30
_WIDTH = 30
_INTERVAL_S = 0.1


class LoadProgress:
    """Counts bytes; draws at most ten times a second, and only where `stream` is a terminal."""

    def __init__(self, name: str, total_bytes: int, stream: TextIO | None = None) -> None:
        self._name, self._total = name, max(total_bytes, 1)
        self._stream = sys.stderr if stream is None else stream
        self._done, self._started_s, self._drawn_s = 0, time.monotonic(), 0.0
        self._is_shown = is_terminal() if stream is None else stream.isatty()

    def add(self, num_bytes: int) -> None:
        """So many more bytes of the checkpoint are loaded."""
        self._done += num_bytes
        now_s = time.monotonic()
        if self._is_shown and now_s - self._drawn_s >= _INTERVAL_S:
            self._drawn_s = now_s
            self._draw(now_s - self._started_s)

    def finish(self) -> None:
        """Takes the bar away."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, seconds: float) -> None:
        share = min(self._done / self._total, 1.0)
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        speed = self._done / GIB / max(seconds, 1e-9)
        self._stream.write(
            f"\rloading {self._name} [{bar}] {share:4.0%} of {self._total / GIB:.2f} GiB, {speed:.2f} GiB/s\x1b[K"
        )
        self._stream.flush()
