"""What the step loop is to do next: functions that any thread puts here, and that its thread runs in their order."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import structlog

from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.flight.where import where_of

log = structlog.get_logger()
T = TypeVar("T")


class Inbox:
    """`take` is for the step loop's thread, all else for any. One that fails is logged, and the next one runs."""

    def __init__(self, recorder: NoRecorder) -> None:
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._recorder = recorder

    def __len__(self) -> int:
        return self._events.qsize()

    def put(self, event: Callable[[], None]) -> None:
        """It is run once, after all that came before."""
        self._events.put(event)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Its result, once it has run between steps. A caller who cancels before that has it not run."""
        future: Future[T] = Future()
        self.put(partial(self._call, future, function))
        return future

    def begin(self, begin: Callable[[Future[int]], None]) -> Future[int]:
        """Of what takes longer than a turn: `begin` gets the future, and has somebody answer it later."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # a caller who goes away stops nothing
        self.put(partial(_begin, future, begin))
        return future

    def take(self, wait_s: float = 0.0) -> None:
        """Waits so long for something to happen, then runs all that has."""
        try:
            event = self._events.get(timeout=wait_s)
            while True:
                self._run(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _run(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as fault:
            log.exception("an event of the step loop failed")
            self._recorder.fault("an event failed", where_of(fault))

    def _call(self, future: Future[T], function: Callable[[], T]) -> None:
        self._recorder.called()
        if not future.set_running_or_notify_cancel():
            return  # the caller is gone
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


def _begin(future: Future[int], begin: Callable[[Future[int]], None]) -> None:
    try:
        begin(future)
    except Exception as error:
        future.set_exception(error)
