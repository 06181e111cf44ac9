"""What strangers may write into a log."""

from __future__ import annotations

from typing import Any

from octavo.shared.few_lines import LINES_PER_S, FewLines


def test_so_many_lines_a_second_and_how_many_there_were_beside() -> None:
    now_s, lines = [0.0], []

    def line(event: str, **fields: Any) -> None:
        lines.append(fields)

    few = FewLines(lambda: now_s[0])
    for number in range(1000):
        few.write(line, "refused", number=number)
    assert lines == [{"number": number} for number in range(LINES_PER_S)]
    now_s[0] = 1.0
    for number in (1000, 1001):
        few.write(line, "refused", number=number)
    assert lines[LINES_PER_S:] == [{"number": 1000, "left_out": 1000 - LINES_PER_S}, {"number": 1001}]
