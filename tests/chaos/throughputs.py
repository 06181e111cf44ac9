"""Tokens a second over a slow network, by steps in flight."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.recovery_times import Row


@dataclass(frozen=True)
class Throughput:
    """Of requests that were sent at once. The delay is each way."""

    delay_ms: int
    steps_in_flight: int
    num_requests: int
    tokens_per_s: float


THROUGHPUTS: list[Throughput] = []
"""Of the tests that have run in this process."""


def summary(throughputs: list[Throughput]) -> list[Row]:
    return [
        {
            "delay_ms_each_way": one.delay_ms,
            "steps_in_flight": one.steps_in_flight,
            "requests": one.num_requests,
            "tokens_per_s": round(one.tokens_per_s, 1),
        }
        for one in throughputs
    ]
