"""What others say at a terminal: control characters spelt out there, and every byte as it came elsewhere."""

from __future__ import annotations

import io
import json
import sys

import pytest

from octavo.cli import CommandError, main
from octavo.shared.terminal_text import TERMINAL, harmless, harmless_line, say

HOSTILE = "\x1b]52;c;eA==\x07\x1b[8mhidden\x9b2J\x7f\r"
SPELT_OUT = r"\u001b]52;c;eA==\u0007\u001b[8mhidden\u009b2J\u007f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_spelt_out_and_nothing_else_is() -> None:
    assert harmless(HOSTILE) == SPELT_OUT
    text = "Grüße,\tläuft\n👩\u200d🚀 שלום \u00a0 \\u001b"
    assert harmless(text) == text
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert [each for each in harmless(everything) if ord(each) < 32 or 127 <= ord(each) < 160] == ["\t", "\n"]


def test_a_line_stays_one_and_is_read_in_its_own_direction() -> None:
    assert harmless_line("Grüße\n\u202eneid\u2066\t\U000e0041") == r"Grüße\u000a\u202eneid\u2066\u0009\U000e0041"
    assert harmless_line("".join(map(chr, range(sys.maxunicode + 1)))).isprintable()


def test_json_stays_json() -> None:
    value = {"text": HOSTILE}
    assert json.loads(harmless(json.dumps(value, ensure_ascii=False))) == value


def test_pipes_and_files_get_it_as_it_is() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        say(HOSTILE, stream)
        say("and on", stream, end="")
    assert terminal.getvalue() == f"{SPELT_OUT}\nand on" and file.getvalue() == f"{HOSTILE}\nand on"


@pytest.mark.parametrize("passed_on", [False, True])
def test_errors_are_harmless_where_people_read_them(passed_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a child, whose standard error is a pipe to a terminal."""
    stream = io.StringIO() if passed_on else Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    if passed_on:
        monkeypatch.setenv(TERMINAL, "1")
    raised: Exception = CommandError("the server says \x1b[2J")

    def fail(arguments: object) -> int:
        raise raised

    monkeypatch.setattr("octavo.commands.health.run", fail)
    assert main(["health"]) == 1
    assert stream.getvalue() == "octavo health: error: the server says \\u001b[2J\n"
    raised = RuntimeError("\x1b[2J")
    assert main(["health"]) == 1
    assert "Traceback" in stream.getvalue() and "\x1b" not in stream.getvalue()
