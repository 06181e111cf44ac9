"""A signal reaches its loop, however far behind that is."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from octavo.shared.signals import on_signal, terminating

NUMBER = signal.SIGUSR2


@pytest.fixture(autouse=True)
def as_before():
    before = signal.getsignal(NUMBER)
    yield
    signal.signal(NUMBER, before)


async def test_a_loop_that_is_woken_from_a_thread_and_does_not_get_to_it_hears_the_signal() -> None:
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    on_signal(NUMBER, heard.set)

    def wake_often() -> None:
        for _ in range(5000):
            loop.call_soon_threadsafe(lambda: None)

    waking = threading.Thread(target=wake_often)
    waking.start()
    waking.join()  # the loop is held meanwhile, and the socket that wakes it is full
    os.kill(os.getpid(), NUMBER)
    assert await asyncio.wait_for(heard.wait(), 20)


async def test_a_loop_that_waits_is_woken_at_each_signal() -> None:
    heard = asyncio.Event()
    on_signal(NUMBER, lambda event: event.set(), heard)
    for _ in range(3):
        sender = threading.Timer(0.01, os.kill, (os.getpid(), NUMBER))
        sender.start()
        assert await asyncio.wait_for(heard.wait(), 20)
        sender.join()
        heard.clear()


def test_after_the_loop_whoever_listened_before_does_again() -> None:
    heard: list[int] = []
    signal.signal(NUMBER, lambda number, frame: heard.append(number))

    async def listen() -> None:
        on_signal(NUMBER, lambda: None)

    asyncio.run(listen())
    os.kill(os.getpid(), NUMBER)
    os.kill(os.getpid(), NUMBER)
    assert heard == [NUMBER, NUMBER]


def test_the_end_of_a_terminal_counts_where_nobody_has_said_to_go_on_without() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert terminating() == [signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert terminating() == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
