"""Pauses before a child process is started again."""

from __future__ import annotations

import time

import pytest

from octavo.shared.processes.child_process import Restarts


def test_pauses_double_up_to_the_longest_and_a_good_life_starts_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    restarts = Restarts(0.25, 1.5, good_life_s=30.0)

    def live(seconds: float) -> float:
        nonlocal now_s
        restarts.started()
        now_s += seconds
        restarts.ended()
        return restarts.pause_s()

    assert [live(1.0) for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5] and restarts.count == 5
    assert live(30.0) == 1.5, "not good yet"
    assert live(30.1) == 0.25 and restarts.count == 1
    assert {live(0.0) for _ in range(1100)} == {0.5, 1.0, 1.5}, "2.0 ** 1024 is more than a float holds"
