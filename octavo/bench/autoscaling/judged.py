"""What a day of a pool comes to: the share of requests within the objective, and the worker-hours it took."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from octavo.bench.autoscaling.pods import Deployment
from octavo.bench.fleet.outcomes import Outcome, Run

WINDOW_S = 300.0  # of the figures over the day


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good when its first token comes in time, and the others at no less than a pace on average.

    `share`: of all requests that have to be good, for the objective to be kept.
    """

    first_token_s: float = 8.0
    between_tokens_ms: float = 150.0
    share: float = 0.99

    def is_met(self, outcome: Outcome, tokens_each: int = 1) -> bool:
        """Whether a request was good. One that failed never is."""
        if outcome.error or not outcome.first_token_ns or outcome.ttft_ns > self.first_token_s * 1e9:
            return False
        gaps = outcome.num_output_tokens - 1
        took_ms = (outcome.last_token_ns - outcome.first_token_ns) / 1e6
        return not gaps or took_ms / gaps / tokens_each <= self.between_tokens_ms


@dataclass(frozen=True, slots=True)
class Judged:
    """A row. Worker-hours count from a pod's creation, its start included, to its end.

    Attributes:
        good: share of requests within the objective.
        worst_hour: the same, of the worst hour of arrival.
        most_workers: that there were to be at once.
        changes: of the number of replicas.
        turns: of those, the ones in another direction than the one before, within half an hour.
        moved: requests that were moved to another worker.
        windows: of WINDOW_S each: arrivals a second, mean number of pods, 99th percentile of the first token's time.
    """

    name: str
    is_kept: bool
    good: float
    worst_hour: float
    ttft_p50_s: float
    ttft_p99_s: float
    between_tokens_p99_ms: float  # of the requests' means
    worker_hours: float
    most_workers: int
    changes: int
    turns: int
    moved: int
    failed: int
    requests: int
    windows: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not there to be measured is null."""
        return asdict(self)


def judge(
    name: str, run: Run, deployment: Deployment, objective: Objective, until_s: float, tokens_each: int = 1
) -> Judged:
    """Of a run that has ended; worker-hours are those until then."""
    outcomes, until_ns = run.outcomes, round(until_s * 1e9)
    is_good = np.array([objective.is_met(outcome, tokens_each) for outcome in outcomes])
    hours = np.array([outcome.request.at_ns // 3_600_000_000_000 for outcome in outcomes])
    ttft_s = np.array([outcome.ttft_ns / 1e9 if outcome.first_token_ns else math.inf for outcome in outcomes])
    paces_ms = np.array(
        [
            (each.last_token_ns - each.first_token_ns) / 1e6 / (each.num_output_tokens - 1) / tokens_each
            for each in outcomes
            if each.num_output_tokens > 1
        ]
    )
    over_time = deployment.replicas_over_time
    return Judged(
        name=name,
        is_kept=bool(is_good.mean() >= objective.share),
        good=round(float(is_good.mean()), 5),
        worst_hour=round(min(float(is_good[hours == hour].mean()) for hour in set(hours.tolist())), 4),
        ttft_p50_s=_percentile(ttft_s, 50),
        ttft_p99_s=_percentile(ttft_s, 99),
        between_tokens_p99_ms=_percentile(paces_ms, 99) if len(paces_ms) else 0.0,
        worker_hours=round(deployment.worker_s(until_ns) / 3600, 2),
        most_workers=max(replicas for _, replicas in over_time),
        changes=len(over_time) - 1,
        turns=num_turns(over_time),
        moved=sum(outcome.num_moves > 0 for outcome in outcomes),
        failed=sum(bool(outcome.error) for outcome in outcomes),
        requests=len(outcomes),
        windows=_windows(outcomes, ttft_s, deployment, until_ns),
    )


def num_turns(over_time: Sequence[tuple[int, int]], within_s: float = 1800.0) -> int:
    """Changes in another direction than the one before, soon after it: flapping."""
    changes = [(at_ns, after > before) for (_, before), (at_ns, after) in itertools.pairwise(over_time)]
    return sum(
        is_up != was_up and at_ns - before_ns < within_s * 1e9
        for (before_ns, was_up), (at_ns, is_up) in itertools.pairwise(changes)
    )


def _windows(
    outcomes: Sequence[Outcome], ttft_s: np.ndarray[Any, np.dtype[np.float64]], deployment: Deployment, until_ns: int
) -> list[dict[str, float]]:
    arrived_s = [outcome.request.at_ns / 1e9 for outcome in outcomes]
    found = []
    for place in range(math.ceil(until_ns / 1e9 / WINDOW_S)):
        start_s, end_s = place * WINDOW_S, (place + 1) * WINDOW_S
        first, last = bisect.bisect_left(arrived_s, start_s), bisect.bisect_left(arrived_s, end_s)
        lives_s = [
            max(0.0, min(pod.ended_ns(until_ns) / 1e9, end_s) - max(pod.created_ns / 1e9, start_s))
            for pod in deployment.pods
        ]
        found.append(
            {
                "arrivals_per_s": round((last - first) / WINDOW_S, 4),
                "workers": round(sum(lives_s) / WINDOW_S, 3),
                "ttft_p99_s": _percentile(ttft_s[first:last], 99) if last > first else 0.0,
            }
        )
    return found


def _percentile(values: np.ndarray[Any, np.dtype[np.float64]], percent: float) -> float:
    return round(float(np.percentile(values, percent, method="inverted_cdf")), 3)
