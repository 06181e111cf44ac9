"""Ctrl-C during work that it would break: none of the work is left out, and it is heard all the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from octavo.shared.ctrl_c import ctrl_c_waits


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_behind_the_outermost_block_and_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        with ctrl_c_waits():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("within")
        done.append("around")
    assert done == ["within", "around"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_the_context_of_what_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, ctrl_c_waits():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")
    assert isinstance(raised.value.__context__, ValueError)


def test_without_a_signal_a_block_gives_its_own_error_and_leaves_the_handler() -> None:
    with pytest.raises(ValueError, match="of the block"), ctrl_c_waits():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_ignores_it_hears_nothing() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ctrl_c_waits():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_change_no_handler() -> None:
    seen = []

    def work() -> None:
        with ctrl_c_waits():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
