"""Rows of progress: drawn over themselves on a terminal, below the lines of the log, and nowhere else."""

from __future__ import annotations

import io

import pytest
import structlog

from octavo.shared import log
from octavo.shared.terminal_row import ByteBar, TerminalRow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("total", "shown"),
    [
        (3 << 30, "loading tiny [###############...............]  50% of 3.00 GiB, "),
        (8 << 20, "loading tiny [###############...............]  50% of 8.00 MiB, "),
    ],
)
def test_a_terminal_sees_a_bar_and_a_file_nothing(total: int, shown: str) -> None:
    for stream in (Terminal(), io.StringIO()):
        bar = ByteBar("loading tiny", total, stream)
        bar.add(total // 2)
        assert stream.getvalue().startswith(f"\r{shown}" if stream.isatty() else "")
        bar.finish()
        assert stream.getvalue().endswith("\r\x1b[K") if stream.isatty() else stream.getvalue() == ""


def test_a_bar_is_not_drawn_for_each_byte() -> None:
    bar = ByteBar("loading tiny", 1000, stream := Terminal())
    for _ in range(1000):
        bar.add(1)
    assert 1 <= stream.getvalue().count("loading") < 500


def test_a_line_of_the_log_takes_the_place_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    log.configure("info")
    row = TerminalRow()
    row.draw("warming up")
    structlog.get_logger().info("cache allocated")
    before, _, after = stream.getvalue().partition("cache allocated")
    assert before.startswith("\rwarming up\x1b[K\r\x1b[K") and after.endswith("\n")
