"""The log line that says how busy a scheduler is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler_svc import statistics
from tests.scheduler.hand_turned_loop import Loop


async def test_throughput_is_that_of_the_interval_and_idle_ones_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "INTERVAL_S", 0.02)
    loop = Loop()
    link = loop.join()
    with capture_logs() as logs:
        watching = asyncio.create_task(statistics.log_statistics(loop.engine))
        started = time.monotonic()
        await asyncio.sleep(0.1)
        assert not _lines(logs), "nothing runs"
        loop.submit("one", "two")
        loop.turn()
        while not _lines(logs):
            assert time.monotonic() < started + 10
            await asyncio.sleep(0.005)
        loop.run_to_end(link)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not any(line["generation_tokens_per_s"] for line in _lines(logs)):
            await asyncio.sleep(0.005)
        num_lines = len(_lines(logs))
        await asyncio.sleep(0.1)
        watching.cancel()
    lines = _lines(logs)
    assert len(lines) == num_lines, "nothing runs any more"
    assert (lines[0]["running"], lines[0]["pending"], lines[0]["workers"]) == (2, 0, 1)
    assert lines[0]["gpu_cache_usage_percent"] == 6.2 and lines[0]["cpu_cache_usage_percent"] == 0.0
    assert lines[-1]["running"] == 0
    rates = [line["generation_tokens_per_s"] for line in lines]
    assert [rate > 0 for rate in rates] == [False] * (len(rates) - 1) + [True]
    assert lines[-1]["prompt_tokens_per_s"] == pytest.approx(rates[-1] / 3, abs=0.1), "6 prompt tokens, 18 others"


def _lines(logs: Any) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "throughput"]
