"""The metrics of a scheduler under the names that dashboards expect, for `metrics_server` to tell.

Read from the step loop's own state at the moment they are asked for; nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.engine import Engine
from scheduler_svc.histogram import Histogram
from scheduler_svc.load import Load

PREFIX = "octavo:"


class EngineCollector(Collector):
    """Over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        load = Load.of(self._engine)
        for name, value, text in (
            ("num_requests_running", load.num_running, "Requests that have slots"),
            ("num_requests_waiting", load.num_pending, "Requests that wait, or are to be computed again"),
            ("num_requests_swapped", load.num_swapped, "Requests whose cache lies in host memory"),
            ("kv_cache_usage_perc", load.device_usage, "Share of device cache blocks in use; 1 is all"),
            ("cpu_cache_usage_perc", load.host_usage, "Share of host cache blocks in use; 1 is all"),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _counters(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        reasons = {reason.name.lower(): count for reason, count in metrics.num_finished.items()}
        yield _counter("num_preemptions", "Requests that were preempted", "mode", metrics.num_preemptions)
        yield _counter("request_success", "Requests that have ended", "finished_reason", reasons)
        yield _counter("admission_rejections", "Requests that were not admitted", "reason", metrics.num_rejected)
        for name, value, text in (
            ("prefix_cache_queries", metrics.num_prefix_queries, "Prompt tokens looked for in the prefix cache"),
            ("prefix_cache_hits", metrics.num_prefix_hits, "Prompt tokens found in the prefix cache"),
            ("prompt_tokens", metrics.num_prompt_tokens, "Prompt tokens of requests that have begun"),
            ("generation_tokens", metrics.num_generation_tokens, "Tokens generated"),
            ("worker_losses", metrics.num_worker_losses, "Workers that were lost"),
            ("requests_resumed", metrics.num_resumed, "Requests admitted with tokens of an earlier life"),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        for name, histogram, text in (
            ("time_to_first_token_seconds", metrics.time_to_first_token_s, "From arrival to the first token"),
            ("inter_token_latency_seconds", metrics.inter_token_latency_s, "Between two tokens of an output"),
            ("e2e_request_latency_seconds", metrics.e2e_request_latency_s, "From arrival to the end"),
            ("request_queue_time_seconds", metrics.request_queue_time_s, "From arrival to the first step"),
            ("request_prompt_tokens", metrics.request_prompt_tokens, "Prompt tokens of a request"),
            ("request_generation_tokens", metrics.request_generation_tokens, "Tokens generated for a request"),
            ("iteration_tokens_total", metrics.iteration_tokens, "Tokens computed in a step"),
        ):
            family = HistogramMetricFamily(PREFIX + name, text)
            family.add_metric([], *_buckets(histogram))
            yield family
        phases = HistogramMetricFamily(PREFIX + "step_phase_seconds", "Time of a step by phase", labels=["phase"])
        for phase, histogram in list(metrics.phase_s.items()):
            phases.add_metric([phase], *_buckets(histogram))
        yield phases


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """(upper end, how many values up to there) for each bucket, and the sum of all values."""
    ends = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(ends, histogram.counts.cumsum().tolist(), strict=True)), histogram.total
