"""Single keys from a terminal, without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def unbuffered() -> Iterator[None]:
    """Standard input gives each key as it is pressed and echoes none; as before at the end. Ctrl-C stays what it is.

    Changes nothing where standard input is no terminal, or the platform has no termios.
    """
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):
        yield
        return
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def pressed(seconds: float) -> str:
    """The next key within so many seconds, or an empty string; waits that long where there is no terminal."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
