"""The thread of a model: what it answers, and that a signal ends a wait for it."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from worker_svc.host import model_thread
from worker_svc.host.model_thread import ModelThread


class Signalled(Exception):
    """What the handler raises, as that of Ctrl-C does."""


def test_an_answer_and_an_error_come_back() -> None:
    thread = ModelThread()
    assert thread.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.stop(10)


def test_a_signal_ends_a_wait_that_it_does_not_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another thread takes leaves the main thread asleep, as one that comes just before it falls asleep."""
    monkeypatch.setattr(model_thread, "_SIGNALS_S", 0.05)
    thread, may_end, was_told = ModelThread(), threading.Event(), list[bool]()

    def be_signalled() -> None:
        time.sleep(0.2)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        was_told.append(may_end.wait(20))

    def handle(number: int, frame: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Signalled):
            thread.run(be_signalled)
        assert not was_told, "it has waited until the work was over"
    finally:
        signal.signal(signal.SIGUSR1, before)
        may_end.set()
    assert thread.stop(10) and was_told == [True]
