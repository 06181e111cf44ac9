"""What an autoscaler reads: samples of the scheduler's metrics, as Prometheus scrapes them, and queries over them.

A signal is known by its query, as the rules of the Prometheus adapter and KEDA's triggers have it, and by the name that
the adapter gives it. The functions compute what Prometheus would answer; a test holds the queries to those shipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.autoscaling.hpa import Metric, Reading

if TYPE_CHECKING:
    from octavo.bench.autoscaling.pods import Deployment
    from octavo.bench.fleet.simulation import Simulation

SCRAPE_S = 15.0  # of the ServiceMonitor
RATE_WINDOW_S = 600.0
FEW_TOKENS = 256.0  # of a prompt, where there was none of late
_MATCH = "{<<.LabelMatchers>>}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Metrics of one scheduler at one time. `tokens_each`: real ones that a simulated token stands for."""

    at_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    cache_usage: float
    prompt_tokens_sum: float
    prompt_tokens_count: int
    busy_s: dict[str, float]  # by pod, since its start


Samples = Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Signal:
    """A query by its name. `read`: of the samples of late, of which there is at least one, the last one newest."""

    name: str
    query: str
    read: Callable[[Samples], Reading]


def _waiting_tokens(samples: Samples) -> float:
    first, last = samples[0], samples[-1]
    tokens = last.prompt_tokens_sum - first.prompt_tokens_sum
    count = last.prompt_tokens_count - first.prompt_tokens_count
    return last.num_waiting * (tokens / count if count and tokens > 0 else FEW_TOKENS)


def _cache_usage(samples: Samples) -> float:
    return samples[-1].cache_usage


def _requests(samples: Samples) -> float:
    last = samples[-1]
    return float(last.num_running + last.num_waiting + last.num_swapped)


def _cpu(samples: Samples) -> dict[str, float]:
    """The share of the time between the last two samples that each worker computed: a core that is all of its limit."""
    if len(samples) < 2:
        return {}
    before, last = samples[-2:]
    past_s = last.at_s - before.at_s
    return {
        pod: min(1.0, (busy_s - before.busy_s[pod]) / past_s)
        for pod, busy_s in last.busy_s.items()
        if pod in before.busy_s
    }


SIGNALS = (
    Signal(
        "octavo_waiting_tokens",
        f"sum(octavo:num_requests_waiting{_MATCH}) * (sum(rate(octavo:request_prompt_tokens_sum{_MATCH}[10m]))"
        f" / sum(rate(octavo:request_prompt_tokens_count{_MATCH}[10m])) > 0 or vector(256))",
        _waiting_tokens,
    ),
    Signal("octavo_kv_cache_usage", f"max(octavo:kv_cache_usage_perc{_MATCH})", _cache_usage),
    Signal(
        "octavo_requests",
        f"sum(octavo:num_requests_running{_MATCH}) + sum(octavo:num_requests_waiting{_MATCH})"
        f" + sum(octavo:num_requests_swapped{_MATCH})",
        _requests,
    ),
    Signal("cpu", "", _cpu),
)


def signal_of(metric: Metric) -> Signal:
    """By name or query. Raises ValueError for one that is not simulated, or not of this kind."""
    wanted = " ".join(metric.name.split())
    for signal in SIGNALS:
        if wanted in (signal.name, signal.query) and wanted:
            if (signal.name == "cpu") != (metric.source == "Resource"):
                raise ValueError(f"{signal.name} as a metric of type {metric.source} is not simulated")
            return signal
    raise ValueError(f"the metric {wanted!r} is not simulated: {', '.join(signal.name for signal in SIGNALS)} are")


class Scraper:
    """Samples the engine of a simulation; `samples` has those of the window of `rate`."""

    def __init__(self, simulation: Simulation, deployment: Deployment, tokens_each: int) -> None:
        self._simulation, self._deployment, self._tokens_each = simulation, deployment, tokens_each
        self.samples: deque[Sample] = deque()

    def scrape(self) -> None:
        """One more sample."""
        from scheduler_svc.engine.load import Load

        (engine,) = self._simulation.engines
        load, prompts = Load.of(engine), engine.metrics.total().request_prompt_tokens
        now_s = self._simulation.now_ns / 1e9
        self.samples.append(
            Sample(
                now_s,
                load.num_running,
                load.num_pending,
                load.num_swapped,
                load.device_usage,
                prompts.total * self._tokens_each,
                int(prompts.counts.sum()),
                {pod.name: pod.link.busy_s(now_s) for pod in self._deployment.present if pod.link is not None},
            )
        )
        while self.samples[0].at_s < now_s - RATE_WINDOW_S:
            self.samples.popleft()
