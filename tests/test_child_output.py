"""What children say, on its way to our standard error: lines whole, one bar at a time, the last line remembered."""

from __future__ import annotations

import pytest

from octavo.shared.processes.child_output import ChildOutput, Screen, environment
from tests.processes import Unread


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_TERMINAL", "1")


def test_lines_are_passed_on_whole_however_they_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    first, second = ChildOutput(screen), ChildOutput(screen)
    first.take(b"one li")
    second.take(b"another\n")
    first.take("ne, \u20ac\nand \u20ac".encode()[:-1])
    first.take("\u20ac".encode()[-1:])
    first.take(b"")
    assert capsys.readouterr().err == "another\none line, \u20ac\nand \u20ac\n"
    assert (first.last_line, second.last_line) == ("and \u20ac", "another")


def test_the_reason_is_the_last_line_without_colours_and_name() -> None:
    output = ChildOutput(Screen())
    output.take(b"a log line\n\x1b[31mocta")
    output.take(b"vo worker: error: no \x1b[0mmodel\n\n")
    assert output.last_line == "octavo worker: error: no model" and output.reason == "no model"


def test_no_line_is_kept_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    output = ChildOutput(Screen())
    for _ in range(100):
        output.take(b"x" * 4096)
    assert len(output.last_line) < 100_000 and len(capsys.readouterr().err) > 200_000


def test_what_nobody_reads_any_more_is_taken_all_the_same(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Unread())
    output = ChildOutput(Screen())
    output.take(b"\rloading 10%\x1b[K")
    output.take(b"\r\x1b[Kx\n")
    assert output.last_line == "x"


def test_a_log_file_gets_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    output = ChildOutput(Screen())
    output.take(b"\rloading 10%\x1b[K")
    assert capsys.readouterr().err == "" and environment() == {}


def test_a_terminal_gets_one_bar_and_lines_above_it(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    first, second = ChildOutput(screen), ChildOutput(screen)
    assert environment() == {"OCTAVO_TERMINAL": "1"}
    first.take(b"\rloading 10%\x1b[K")
    second.take(b"\rloading 20%\x1b[K")
    assert capsys.readouterr().err == "\rloading 10%\x1b[K", "one bar at a time"
    second.take(b"\r\x1b[Kready\n")
    assert capsys.readouterr().err.startswith("\r\x1b[K"), "no line is written into the bar"
    first.take(b"\rloading 50%\x1b[K\rloading 60%\x1b[K")
    assert capsys.readouterr().err == "\rloading 60%\x1b[K"
    first.take(b"\r\x1b[K")
    second.take(b"\rloading 90%\x1b[K")
    assert capsys.readouterr().err == "\r\x1b[K\rloading 90%\x1b[K", "the first is done: the second may draw"
    second.take(b"\r\x1b[K")
    second.take(b"")
    assert capsys.readouterr().err == "\r\x1b[K", "and at the end it leaves no empty line"
