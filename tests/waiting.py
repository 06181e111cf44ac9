"""How tests wait for what another thread, process or task brings about: by looking again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PAUSE_S = 0.005  # between two looks


def wait_until(holds: Callable[[], object], what: str = "", seconds: float = 10.0) -> None:
    """Returns once `holds` returns something true. Raises AssertionError that names `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, _not_within(seconds, what or repr(holds))
        time.sleep(PAUSE_S)


async def until(holds: Callable[[], object], what: str = "", seconds: float = 10.0) -> None:
    """As `wait_until`, where the event loop goes on meanwhile; `holds` itself is no coroutine function."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, _not_within(seconds, what or repr(holds))
        await asyncio.sleep(PAUSE_S)


def _not_within(seconds: float, what: str) -> str:
    return f"not within {seconds:g} s: {what}"
