"""Signals on an event loop, none of which is lost.

`loop.add_signal_handler` has a signal's number written into the socket that `call_soon_threadsafe` wakes the loop
with. A loop that is behind, with some 280 wake-ups from other threads unread, has that socket full: the signal is lost.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


def terminating() -> list[signal.Signals]:
    """Those that end a service in order: SIGTERM, and SIGHUP, by which the end of a terminal would end it as SIGKILL
    does; not where that is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


def on_signal(number: int, callback: Callable[..., object], *arguments: Any) -> None:
    """`callback` is called on the running event loop, at each signal until the loop is closed. For the main thread."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        if loop.is_closed():
            signal.signal(number, before)
            signal.raise_signal(number)
        else:
            loop.call_soon_threadsafe(callback, *arguments)  # whether or not its socket is full

    before = signal.signal(number, handle)
    signal.siginterrupt(number, False)
