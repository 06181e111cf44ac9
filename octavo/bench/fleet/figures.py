"""What a run of a pool says: throughput, times to tokens, hits, balance and the scheduler's own time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.bench.fleet.outcomes import Run


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """One size of pool. Times are virtual, but for the scheduler's own.

    Attributes:
        tokens_per_s: output tokens, from the first arrival to the last end.
        between_tokens_p50_ms: over all gaps between tokens of one request.
        longest_silence_ms: the longest of those.
        cache_hit_rate: of prompt tokens, the share that was cached when their request was begun.
        balance: how busy the workers were on average, over the busiest one: 1 where all were alike.
        decision_us_per_step: CPU time of the step loop's thread over the steps of all workers, but for taking answers
            and looks at the clock: choosing workers for requests, and scheduling and encoding steps. What simulated
            workers do is not in it, nor what their callers do to hand requests over.
        plain_step_us: of that, for a step that begins no request.
        begin_us_per_request: what each request adds to it from its arrival to the step that it begins with.
        engine_us_per_step: of that thread as a whole.
        front_us_per_request: CPU time of choosing a shard, where there are several.
        failed: requests that ended in an error.
    """

    workers: int
    shards: int
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    virtual_s: float
    tokens_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    longest_silence_ms: float
    cache_hit_rate: float
    balance: float
    busy: float  # share of their time that workers computed
    preemptions: int
    steps: int
    decision_us_per_step: float
    plain_step_us: float
    begin_us_per_request: float
    engine_us_per_step: float
    front_us_per_request: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not there to be measured is null."""
        values = asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}


def measure(run: Run, num_workers: int) -> FleetFigures:
    """The figures of a run with at least one request; `num_workers`: of the pool, those that were lost included."""
    outcomes = run.outcomes
    started_ns = min(outcome.request.at_ns for outcome in outcomes)
    virtual_s = (run.ended_ns - started_ns) / 1e9
    output_tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    ttft_ms = np.array([outcome.ttft_ns for outcome in outcomes if outcome.first_token_ns]) / 1e6
    gaps_ms = np.array(run.gaps_ns) / 1e6
    busy_ns: dict[str, int] = {}
    for worker in run.workers:
        busy_ns[worker.address] = busy_ns.get(worker.address, 0) + worker.busy_ns
    mean_ns, most_ns = sum(busy_ns.values()) / num_workers, max(busy_ns.values())
    plain_us = run.plain_cpu_ns / 1e3 / run.num_plain_steps if run.num_plain_steps else math.nan
    begin_us = (run.decision_cpu_ns / 1e3 - plain_us * run.num_steps) / run.num_begun if run.num_begun else math.nan
    return FleetFigures(
        workers=num_workers,
        shards=run.num_shards,
        requests=len(outcomes),
        failed=sum(bool(outcome.error) for outcome in outcomes),
        prompt_tokens=sum(outcome.request.num_prompt_tokens for outcome in outcomes),
        output_tokens=output_tokens,
        virtual_s=round(virtual_s, 6),
        tokens_per_s=round(output_tokens / virtual_s, 3) if virtual_s else math.nan,
        ttft_mean_ms=round(float(ttft_ms.mean()), 3) if len(ttft_ms) else math.nan,
        ttft_p50_ms=_percentile(ttft_ms, 50),
        ttft_p99_ms=_percentile(ttft_ms, 99),
        between_tokens_p50_ms=_percentile(gaps_ms, 50),
        between_tokens_p99_ms=_percentile(gaps_ms, 99),
        longest_silence_ms=_percentile(gaps_ms, 100),
        cache_hit_rate=round(run.num_cached_tokens / run.num_prompt_tokens, 6) if run.num_prompt_tokens else 0.0,
        balance=round(mean_ns / most_ns, 4) if most_ns else 1.0,
        busy=round(mean_ns / 1e9 / virtual_s, 4) if virtual_s else math.nan,
        preemptions=run.num_preemptions,
        steps=run.num_steps,
        decision_us_per_step=round(run.decision_cpu_ns / 1e3 / run.num_steps, 1) if run.num_steps else math.nan,
        plain_step_us=round(plain_us, 1),
        begin_us_per_request=round(begin_us, 1),
        engine_us_per_step=round(run.engine_cpu_ns / 1e3 / run.num_steps, 1) if run.num_steps else math.nan,
        front_us_per_request=round(run.front_cpu_ns / 1e3 / len(outcomes), 1) if run.num_shards > 1 else math.nan,
    )


def _percentile(values: npt.NDArray[np.float64], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; NaN without values."""
    if not len(values):
        return math.nan
    return round(float(np.percentile(values, percent, method="inverted_cdf")), 3)


_HEADERS = (
    "workers",
    "tokens/s",
    "first token mean / p50 / p99",
    "between tokens p50 / p99 / most",
    "cached",
    "balance",
    "busy",
    "decision / whole loop",
)


def table(rows: Sequence[FleetFigures]) -> str:
    """A Markdown table, a row a size of pool."""
    cells = [_HEADERS, tuple("---" for _ in _HEADERS), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _cells(row: FleetFigures) -> tuple[str, ...]:
    return (
        f"{row.workers}",
        _number(row.tokens_per_s),
        _milliseconds(row.ttft_mean_ms, row.ttft_p50_ms, row.ttft_p99_ms),
        _milliseconds(row.between_tokens_p50_ms, row.between_tokens_p99_ms, row.longest_silence_ms),
        f"{100 * row.cache_hit_rate:.1f} %",
        f"{row.balance:.2f}",
        f"{_number(100 * row.busy)} %",
        f"{_number(row.decision_us_per_step)} / {_number(row.engine_us_per_step)} us/step",
    )


def _milliseconds(*values: float) -> str:
    return " / ".join(map(_number, values)) + " ms"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"
