"""Work that Ctrl-C would break half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """What SIGINT does is done behind the block, not between any two of its instructions: for what does not take long.

    Nothing but the main thread is ever interrupted; on others this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    frames: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])
