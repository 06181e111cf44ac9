"""What people see while CPU kernels are compiled."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import numba
import pytest
from numba.core import event
from structlog.testing import capture_logs

from worker_svc.host import compile_progress
from worker_svc.host.compile_progress import CompileProgress


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileProgress]:
    monkeypatch.setattr(compile_progress, "is_terminal", lambda: True)
    found = CompileProgress()
    found.start()
    yield found
    event.unregister("numba:compile", found)


def compiled() -> Callable[[int], int]:
    """A function that is new to numba, and calls one that is new, too."""

    @numba.njit
    def inner(value: int) -> int:
        return value + 1

    @numba.njit
    def outer(value: int) -> int:
        return inner(value) * 2

    return outer


def test_what_takes_long_is_shown_and_logged(progress: CompileProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_SILENT_S", 0.0)
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    function = compiled()
    with capture_logs() as lines:
        assert function(3) == 8
        assert re.search(r"\rcompiling CPU kernels: [12] functions in \d+ s\x1b\[K$", screen.getvalue())
        progress.finish()
        assert function(4) == 10, "it is compiled already"
    assert [line["event"] for line in lines] == [
        "compiling CPU kernels for sampling, some ten seconds once on this machine",
        "CPU kernels compiled",
    ]
    assert lines[1]["functions"] >= 2 and screen.getvalue().endswith("\r\x1b[K"), "nothing of the row is left"


def test_what_takes_no_time_is_not_worth_a_word(progress: CompileProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "_SILENT_S", 60.0)
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    with capture_logs() as lines:
        assert compiled()(3) == 8
        progress.finish()
    assert lines == [] and screen.getvalue() == ""
