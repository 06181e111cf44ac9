"""What child processes write to standard error: passed on to ours as it comes, the last line of each remembered.

A child writes to a pipe and would take it for a log file; `environment` says otherwise where ours is a terminal. Of the
progress bars that several draw at once one is shown.
"""

from __future__ import annotations

import contextlib
import re
import sys

from octavo.shared.terminal_text import TERMINAL, is_terminal

_LONGEST_LINE = 1 << 16  # bytes; what goes on for longer is cut, not kept
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours, and "clear to the end of the line"
_REASON = re.compile(r"octavo \S+: error: ")  # so the last line of a command that failed begins


def environment() -> dict[str, str]:
    """Variables for a child whose output is passed on."""
    return {TERMINAL: "1"} if is_terminal() else {}


class Screen:
    """Our standard error: whole lines, and at most one row at the end that is still drawn over."""

    def __init__(self) -> None:
        self._drawing: ChildOutput | None = None  # whose row it is
        self._is_drawn = False

    def line(self, text: str) -> None:
        """Writes a line above the row that is being drawn."""
        clear = "\r\x1b[K" if self._is_drawn else ""
        self._is_drawn = False
        self._write(f"{clear}{text}\n")

    def draw(self, child: ChildOutput, text: str) -> None:
        """Draws the last row over; another child's is left alone until that child has cleared it."""
        if self._drawing not in (None, child) or not is_terminal():
            return
        self._is_drawn = bool(plain(text))
        self._drawing = child if self._is_drawn else None
        self._write(text)

    def _write(self, text: str) -> None:
        # Whoever read it may be gone: what children write is read all the same, or they would wait for that for ever.
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:  # of a program without a console
                sys.stderr.write(text)
                sys.stderr.flush()


class ChildOutput:
    """The output of one child."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._rest = b""  # of a line that has not ended
        self.last_line = ""  # without colours; not an empty one

    @property
    def reason(self) -> str:
        """The last line, without the name of the command that it is said by."""
        return _REASON.sub("", self.last_line, count=1)

    def take(self, data: bytes) -> None:
        """What was read; nothing: the child has closed its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        if lines and not data and not plain(lines[-1].decode(errors="replace")):
            lines.pop()  # what took a row away is no line
        for line in lines:
            text = line.decode(errors="replace")
            self.last_line = plain(text) or self.last_line
            self._screen.line(text)
        if b"\r" in self._rest:
            self._rest = b"\r" + self._rest.rpartition(b"\r")[2]
            self._screen.draw(self, self._rest.decode(errors="replace"))


def plain(text: str) -> str:
    """What remains visible of a line that was overwritten, without colours."""
    return _ESCAPES.sub("", text.rpartition("\r")[2]).strip()
