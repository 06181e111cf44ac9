"""Progress of long work: a row at the end of a terminal that is drawn over itself, and nothing in log files.

A line of the log takes the row away (`log`); the next drawing brings it back.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from octavo.shared.terminal_text import is_terminal

MIB, GIB = 1 << 20, 1 << 30
_WIDTH = 30
_INTERVAL_S = 0.1


class TerminalRow:
    """Draws only where `stream` is a terminal (default: standard error, and who reads it)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_shown = is_terminal() if stream is None else stream.isatty()

    def draw(self, text: str) -> None:
        """Shows `text` in place of what is there."""
        if self.is_shown:
            self._stream.write(f"\r{text}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        """Takes the row away."""
        self.draw("")


class ByteBar:
    """Counts bytes of `what`; draws at most ten times a second."""

    def __init__(self, what: str, total_bytes: int, stream: TextIO | None = None) -> None:
        self._what, self._total = what, max(total_bytes, 1)
        self._row = TerminalRow(stream)
        self._done, self._started_s, self._drawn_s = 0, time.monotonic(), 0.0

    def add(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        self.reach(self._done + num_bytes)

    def reach(self, num_bytes: int) -> None:
        """So many bytes are done in all."""
        self._done = num_bytes
        now_s = time.monotonic()
        if self._row.is_shown and now_s - self._drawn_s >= _INTERVAL_S:
            self._drawn_s = now_s
            self._draw(now_s - self._started_s)

    def finish(self) -> None:
        """Takes the bar away."""
        self._row.clear()

    def _draw(self, seconds: float) -> None:
        share = min(self._done / self._total, 1.0)
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        unit, name = (GIB, "GiB") if self._total >= GIB / 10 else (MIB, "MiB")
        speed = self._done / unit / max(seconds, 1e-9)
        self._row.draw(f"{self._what} [{bar}] {share:4.0%} of {self._total / unit:.2f} {name}, {speed:.2f} {name}/s")
