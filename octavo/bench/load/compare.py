"""Two measurements beside each other: ratios of medians over repeats, and how far the repeats lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

_FIGURES: tuple[tuple[str, str, str | None, bool], ...] = (  # shown, its name, percentile, whether more is better
    ("requests/s", "requests_per_s", None, True),
    ("tokens/s", "output_tokens_per_s", None, True),
    ("goodput/s", "goodput_per_s", None, True),
    ("TTFT p50", "ttft_ms", "p50", False),
    ("TTFT p99", "ttft_ms", "p99", False),
    ("between tokens p50", "between_tokens_ms", "p50", False),
    ("between tokens p99", "between_tokens_ms", "p99", False),
    ("TPOT p50", "tpot_ms", "p50", False),
    ("e2e p50", "e2e_ms", "p50", False),
)
_OF_HARDWARE = ("cpu", "cores", "memory_gib", "system")


@dataclass(frozen=True)
class Ratio:
    """B by A of one figure under one load; `low` and `high` are the least and most of any repeat of B by any of A."""

    load: str
    figure: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    more_is_better: bool

    def is_worse_by(self, percent: float) -> bool:
        """Whether the medians are that much worse. The spread is for the reader."""
        factor = 1 + percent / 100
        return self.ratio * factor < 1 if self.more_is_better else self.ratio > factor


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Ratio]:
    """Every figure that both have, load by load in A's order."""
    runs_a, runs_b = _by_load(a), _by_load(b)
    found = []
    for load in (load for load in runs_a if load in runs_b):
        for shown, name, part, more_is_better in _FIGURES:
            values_a = list(_values(runs_a[load], name, part))
            values_b = list(_values(runs_b[load], name, part))
            if values_a and values_b and min(values_a) > 0:
                middle_a, middle_b = median(values_a), median(values_b)
                low, high = min(values_b) / max(values_a), max(values_b) / min(values_a)
                ratio = middle_b / middle_a
                found.append(Ratio(load, shown, middle_a, middle_b, ratio, low, high, more_is_better))
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why the two are not alike, a line each: workload, hardware, what was asked; loads that only one has; errors."""
    pairs = [("workload", name, a["workload"].get(name), b["workload"].get(name)) for name in _names("workload", a, b)]
    pairs += [("target", name, a["target"].get(name), b["target"].get(name)) for name in _names("target", a, b)]
    pairs += [("hardware", name, a["hardware"].get(name), b["hardware"].get(name)) for name in _OF_HARDWARE]
    lines = [
        f"{kind} differs: {name} is {left!r}, then {right!r}" for kind, name, left, right in pairs if left != right
    ]
    loads_a, loads_b = _by_load(a), _by_load(b)
    lines += [f"only one has the load {load!r}" for load in sorted(loads_a.keys() ^ loads_b.keys())]
    for name, loads in (("the first", loads_a), ("the second", loads_b)):
        if failed := sum(run["failed"] for runs in loads.values() for run in runs):
            lines.append(f"{failed} requests of {name} failed, and are in no time")
    return lines


def table(ratios: Iterable[Ratio]) -> str:
    """In Markdown."""
    rows = [("load", "figure", "A", "B", "B / A", "spread"), ("---",) * 6]
    for each in ratios:
        spread = "-" if math.isclose(each.low, each.high) else f"{each.low:.2f} to {each.high:.2f}"
        rows.append((each.load, each.figure, f"{each.a:.2f}", f"{each.b:.2f}", f"{each.ratio:.3f}", spread))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _by_load(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    loads: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        loads.setdefault(run["figures"]["load"], []).append(run["figures"])
    return loads


def _values(runs: list[dict[str, Any]], name: str, part: str | None) -> Iterable[float]:
    for run in runs:
        value = run.get(name) if part is None else run[name][part]
        if value is not None:
            yield value


def _names(kind: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(a[kind].keys() | b[kind].keys())
