"""When requests of an open loop are sent: by a plan that a seed gives, whatever the server does."""

from __future__ import annotations

import math
import random


def times(
    count: int, rate: float, *, burstiness: float = 1.0, ramp_to: float | None = None, seed: int = 0
) -> list[float]:
    """Seconds from the start of the run, ascending, `rate` a second on average.

    Gaps are gamma distributed with shape `burstiness`: their coefficient of variation is 1 / sqrt(burstiness), so 1 is
    a Poisson process, less comes in bursts, infinity is a clock. With `ramp_to` the rate changes linearly from `rate`
    to that, over as long as `count` requests take on average; what comes later keeps that rate.
    """
    rng = random.Random(f"arrivals/{seed}")
    passed, planned = 0.0, []
    for _ in range(count):
        gap = 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness)
        passed += gap
        planned.append(passed / rate if ramp_to is None else _on_ramp(passed, count, rate, ramp_to))
    return planned


def _on_ramp(passed: float, count: int, first: float, last: float) -> float:
    """When `passed` requests are expected: the integral of the rate, solved for its end."""
    length_s = 2 * count / (first + last)
    if passed >= count:
        return length_s + (passed - count) / last
    slope = (last - first) / length_s
    return 2 * passed / (first + math.sqrt(first * first + 2 * slope * passed))  # holds for a slope of 0, too
