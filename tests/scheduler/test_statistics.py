"""The log line that says how busy a scheduler is."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from scheduler_svc.engine import statistics
from tests.scheduler.hand_turned_loop import Loop
from tests.waiting import until


async def test_throughput_is_that_of_the_interval_and_idle_ones_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "INTERVAL_S", 0.02)
    loop = Loop()
    link = loop.join()
    loop.turn()
    with capture_logs() as logs:
        watching = asyncio.create_task(statistics.log_statistics(loop.engine))
        for request_ids in (("one", "two"), ("three", "four")):
            await asyncio.sleep(0.1)
            assert not logs, "nothing runs"
            loop.submit(*request_ids)
            loop.turn()
            await until(lambda: logs)
            assert logs[0]["event"] == "throughput"
            assert (logs[0]["running"], logs[0]["pending"], logs[0]["workers"]) == (2, 0, 1)
            assert logs[0]["gpu_cache_usage_percent"] == 6.2 and logs[0]["cpu_cache_usage_percent"] == 0.0
            loop.run_to_end(link)
            await until(lambda: logs[-1]["generation_tokens_per_s"])
            *before, last = logs
            assert not any(line["generation_tokens_per_s"] for line in before) and last["running"] == 0
            expected = last["generation_tokens_per_s"] / 3
            assert last["prompt_tokens_per_s"] == pytest.approx(expected, abs=0.1), "6 prompt tokens, 18 others"
            logs.clear()
        watching.cancel()


def test_of_several_models_each_is_said() -> None:
    loop = Loop()
    for fingerprint, name in (("1", "a"), ("2", "b")):
        loop.engine.metrics.introduce(fingerprint, name)
        loop.join(f"worker {name}", max_num_seqs=2, model=fingerprint)
    for number in range(3):
        loop.engine.submit(loop.group(f"{number}", model="2"))
    loop.turn()
    with capture_logs() as logs:
        statistics.StatisticsLine(loop.engine).log()
    (line,) = logs
    assert line["models"] == "a: 0+0, b: 2+1" and (line["running"], line["pending"]) == (2, 1)
