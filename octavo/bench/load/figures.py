"""What a run of a load says: times to tokens, throughput, goodput, errors, and how the client itself kept up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.figures import percentile
from octavo.bench.load.record import Record
from octavo.bench.load.runner import Run

LATE_MS = 20.0  # sent so late at the 99th percentile, an open loop is no longer what was planned
BUSY = 0.8  # of a core: above, the client's own work shows in the times it measures

Percentiles = dict[str, float | None]  # p50, p90, p99 in milliseconds; None without values


@dataclass(frozen=True)
class Slo:
    """Bounds for a request, in milliseconds: to its first token, and a token after it; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def holds(self, record: Record) -> bool:
        """Whether the request ended well and within both; one of a single token has no time per token."""
        ttft_s, tpot_s = record.ttft_s, record.tpot_s
        if record.error is not None or ttft_s is None:
            return False
        in_time = self.ttft_ms is None or ttft_s * 1e3 <= self.ttft_ms
        return in_time and (self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)


@dataclass(frozen=True)
class LoadFigures:
    """Of the requests after the warm-up. Percentiles are over those that ended well; rates are over `seconds`."""

    load: str  # "4 requests/s", "8 streams", "trace"
    rate: float | None  # requests a second that were planned, where they were
    streams: int | None
    repeat: int
    requests: int
    failed: int
    errors: dict[str, int]  # by kind
    prompt_tokens: int
    output_tokens: int
    seconds: float  # from the first request sent to the last that ended
    requests_per_s: float  # that ended well
    output_tokens_per_s: float
    ttft_ms: Percentiles
    between_tokens_ms: Percentiles  # gaps between deliveries of one request
    tpot_ms: Percentiles  # of each request: last token less first, by the tokens after the first
    e2e_ms: Percentiles
    slo: dict[str, float | None] | None
    goodput_share: float | None  # of all requests, failed ones included
    goodput_per_s: float | None
    late_ms: Percentiles  # sent after the plan
    client_cpu_share: float  # of a core, warm-up included
    client_cpu_s_per_1000_tokens: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def warnings(self) -> list[str]:
        """Why the client may have measured itself."""
        found = []
        late_ms = self.late_ms["p99"]
        if late_ms is not None and late_ms > LATE_MS:
            found.append(f"{self.load}: requests were sent up to {late_ms:.0f} ms (p99) after the plan")
        if self.client_cpu_share > BUSY:
            found.append(f"{self.load}: the client used {100 * self.client_cpu_share:.0f} % of a core")
        return found


def measure(
    run: Run,
    *,
    load: str,
    rate: float | None = None,
    streams: int | None = None,
    repeat: int = 0,
    warm_up: int = 0,
    slo: Slo | None = None,
) -> LoadFigures:
    """Figures of a run without its first `warm_up` requests."""
    records = run.records[warm_up:]
    good = [each for each in records if each.error is None]
    seconds = max((each.end_s for each in records), default=0.0) - min((each.sent_s for each in records), default=0.0)
    num_good = sum(map(slo.holds, records)) if slo else 0
    all_tokens = sum(each.output_tokens for each in run.records)
    return LoadFigures(
        load=load,
        rate=rate,
        streams=streams,
        repeat=repeat,
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(each.error for each in records if each.error is not None)),
        prompt_tokens=sum(each.prompt_tokens for each in good),
        output_tokens=sum(each.output_tokens for each in good),
        seconds=seconds,
        requests_per_s=_rate(len(good), seconds),
        output_tokens_per_s=_rate(sum(each.output_tokens for each in good), seconds),
        ttft_ms=_percentiles([each.ttft_s for each in good]),
        between_tokens_ms=_percentiles(
            [after - before for each in good for before, after in zip(each.times_s, each.times_s[1:], strict=False)]
        ),
        tpot_ms=_percentiles([each.tpot_s for each in good]),
        e2e_ms=_percentiles([each.end_s - each.sent_s for each in good]),
        slo=asdict(slo) if slo else None,
        goodput_share=_rate(num_good, len(records)) if slo else None,
        goodput_per_s=_rate(num_good, seconds) if slo else None,
        late_ms=_percentiles([each.late_s for each in records]),
        client_cpu_share=_rate(run.cpu_s, run.wall_s),
        client_cpu_s_per_1000_tokens=1000 * run.cpu_s / all_tokens if all_tokens else None,
    )


def _rate(amount: float, by: float) -> float:
    return amount / by if by else 0.0


def _percentiles(seconds: Sequence[float | None]) -> Percentiles:
    values_ms = [value * 1e3 for value in seconds if value is not None]
    found = {f"p{percent}": percentile(values_ms, percent) for percent in (50, 90, 99)}
    return {name: None if math.isnan(value) else value for name, value in found.items()}
