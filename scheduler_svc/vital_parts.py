"""What the service cannot live without: threads and tasks whose unexpected end is the end of the service.

A thread that dies takes nothing along by itself: health would go on to say SERVING, and requests would wait for ever.
So each is started here with a function that says whether it may end now. The first that ends before that makes the
service not ready, lets it refuse new requests, and ends the process with an exit code for which it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class ServiceBroken(Exception):
    """A part has ended that the service cannot live without. The message is one line that names it, and says why."""


class VitalParts:
    """Any thread may start parts, and ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure = ""
        self._listeners: list[Callable[[], None]] = []

    @property
    def failure(self) -> str:
        """Which part has ended first, and why; "" while all is well."""
        return self._failure

    def thread(self, name: str, target: Callable[[], None], may_end: Callable[[], bool]) -> threading.Thread:
        """A daemon thread, not started yet. `may_end`: whether it was told to, asked when it does."""

        def run() -> None:
            try:
                target()
            except BaseException as error:
                self.fail(name, error)
            else:
                if not may_end():
                    self.fail(name, None)

        return threading.Thread(target=run, name=name, daemon=True)

    def task(self, name: str, work: Coroutine[Any, Any, None], may_end: Callable[[], bool]) -> asyncio.Task[None]:
        """A task of the running loop. It may be cancelled by whoever holds it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (task.exception() is not None or not may_end()):
                self.fail(name, task.exception())

        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(ended)
        return task

    def fail(self, name: str, error: BaseException | None) -> None:
        """A part has ended before its time. The first one is the reason that is told, once."""
        why = "it ended by itself" if error is None else f"{type(error).__name__}: {error}"
        with self._lock:
            is_first, self._failure = not self._failure, self._failure or f"{name}: {why}"
            listeners = list(self._listeners)  # whoever comes from now on is told as it comes
        if not is_first:
            return
        log.critical("a part has ended that the service needs", part=name, why=why, exc_info=error)
        for listener in listeners:
            listener()

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Has `listener` called once when a part has failed, on any thread, at once where one has."""
        with self._lock:
            if not self._failure:
                self._listeners.append(listener)
                return
        listener()

    async def broken(self) -> None:
        """Waits for the first part to fail, and raises ServiceBroken."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the service has ended
                loop.call_soon_threadsafe(event.set)

        self.on_failure(wake)
        await event.wait()
        raise ServiceBroken(self._failure)
