"""The metrics of a scheduler under the names that dashboards expect, for `metrics_server` to tell.

Read from the step loop's own state at the moment they are asked for; nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.load import Load
from scheduler_svc.engine.metrics.histogram import Histogram

PREFIX = "octavo:"
MODEL = "model_name"
Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class EngineCollector(Collector):
    """Over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._metrics = engine, engine.metrics

    def collect(self) -> Iterator[Metric]:
        """On the thread of whoever asks: the step loop's counters are read without a lock."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        loads = Load.by_model(self._engine)
        for name, attribute, text in (
            ("num_requests_running", "num_running", "Requests that have slots"),
            ("num_requests_waiting", "num_pending", "Requests that wait, or are to be computed again"),
            ("num_requests_swapped", "num_swapped", "Requests whose cache lies in host memory"),
            ("num_workers", "num_workers", "Workers that have joined"),
            ("kv_cache_usage_perc", "device_usage", "Share of device cache blocks in use; 1 is all"),
            ("cpu_cache_usage_perc", "host_usage", "Share of host cache blocks in use; 1 is all"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[MODEL])
            for model, load in loads.items():
                gauge.add_metric([model], getattr(load, attribute))
            yield gauge
        held = GaugeMetricFamily(PREFIX + "num_requests_held", "Requests that a limit of their tenant holds")
        held.add_metric([], self._engine.num_held)
        yield held

    def _counters(self) -> Iterator[Metric]:
        models = self._metrics.by_name()
        preemptions = {model: metrics.num_preemptions for model, metrics in models.items()}
        ends = {
            model: {reason.name.lower(): count for reason, count in metrics.num_finished.items()}
            for model, metrics in models.items()
        }
        yield _counter("num_preemptions", "Requests that were preempted", "mode", preemptions)
        yield _counter("request_success", "Requests that have ended", "finished_reason", ends)
        rejections = CounterMetricFamily(
            PREFIX + "admission_rejections", "Requests that were not admitted", labels=["reason"]
        )
        for reason, count in list(self._metrics.num_rejected.items()):
            rejections.add_metric([reason], count)
        yield rejections
        over = CounterMetricFamily(
            PREFIX + "tenant_refusals", "Requests refused by a limit of their tenant", labels=["tenant", "limit"]
        )
        for (tenant, limit), count in list(self._metrics.num_over_limit.items()):
            over.add_metric([tenant, limit], count)
        yield over
        for name, attribute, text in (
            ("prefix_cache_queries", "num_prefix_queries", "Prompt tokens looked for in the prefix cache"),
            ("prefix_cache_hits", "num_prefix_hits", "Prompt tokens found in the prefix cache"),
            ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of requests that have begun"),
            ("generation_tokens", "num_generation_tokens", "Tokens generated"),
            ("worker_losses", "num_worker_losses", "Workers that were lost"),
            ("requests_resumed", "num_resumed", "Requests admitted with tokens of an earlier life"),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=[MODEL])
            for model, metrics in models.items():
                counter.add_metric([model], getattr(metrics, attribute))
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        models = self._metrics.by_name()
        for name, attribute, text in (
            ("time_to_first_token_seconds", "time_to_first_token_s", "From arrival to the first token"),
            ("aborted_wait_seconds", "aborted_wait_s", "From arrival to the end, if aborted before the first token"),
            ("inter_token_latency_seconds", "inter_token_latency_s", "Between two tokens of an output"),
            ("e2e_request_latency_seconds", "e2e_request_latency_s", "From arrival to the end"),
            ("request_queue_time_seconds", "request_queue_time_s", "From arrival to the first step"),
            ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request"),
            ("request_generation_tokens", "request_generation_tokens", "Tokens generated for a request"),
            ("iteration_tokens_total", "iteration_tokens", "Tokens computed in a step"),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=[MODEL])
            for model, metrics in models.items():
                family.add_metric([model], *_buckets(getattr(metrics, attribute)))
            yield family
        phases = HistogramMetricFamily(
            PREFIX + "step_phase_seconds", "Time of a step by phase", labels=["phase", MODEL]
        )
        for model, metrics in models.items():
            for phase, histogram in list(metrics.phase_s.items()):
                phases.add_metric([phase, model], *_buckets(histogram))
        yield phases


def _counter(name: str, text: str, label: str, models: Mapping[str, Mapping[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label, MODEL])
    for model, values in models.items():
        for key, value in list(values.items()):
            family.add_metric([key, model], value)
    return family


def _buckets(histogram: Histogram) -> tuple[list[Bucket], float]:
    """(upper end, how many values up to there) for each bucket, some with the trace of a value, and the sum of all."""
    ends = [*map(str, histogram.bounds), "+Inf"]
    buckets: list[Bucket] = list(zip(ends, histogram.counts.cumsum().tolist(), strict=True))
    for place, (value, context, came_s) in list(histogram.exemplars.items()):
        labels = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        end, count, *_ = buckets[place]
        buckets[place] = (end, count, Exemplar(labels, value, round(came_s, 3)))
    return buckets, histogram.total
