"""One thread that does everything that touches the model, in the order in which it was asked to.

Apart from gRPC's event loop, so that a slow step delays no heartbeat. Knows nothing of steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
_SIGNALS_S = 1.0  # how long Ctrl-C may wait at the worst


class ModelThread:
    """A daemon thread: a process can end while a step still runs."""

    def __init__(self, name: str = "model") -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Runs `task` after all that was submitted before; what it raises is logged."""
        self._tasks.put(task)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """As `submit`, with an answer; not run where the future is cancelled before its turn."""
        future: Future[T] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.submit(task)
        return future

    def run(self, function: Callable[[], T]) -> T:
        """As `call`, and waits for the answer; Ctrl-C ends the wait.

        A signal that comes in the last instant before a wait is handled only when that ends, so each has an end.
        """
        future = self.call(function)
        while not wait([future], timeout=_SIGNALS_S).done:
            pass
        return future.result()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after what was submitted; False if it has not ended in time."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a task failed", thread=self._thread.name)
