"""Two days of requests under the shipped autoscaling rule and others, in virtual time: figures of docs/scaling.md.

    python -m benchmarks.autoscaling [--day NAME] [--row NAME]    plays, and keeps each row in benchmarks/results/
    python -m docs.generate                                        writes tables and pictures from them

A row is one day of one rule, with one time that workers take to start. `octavo bench fleet --autoscale`
plays one as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.bench import machine
from octavo.bench.autoscaling import days, manifest, play
from octavo.bench.autoscaling.hpa import Behavior, Metric, Policy, Rule
from octavo.bench.autoscaling.judged import Judged, Objective
from octavo.bench.fleet.worker import WorkerKind
from octavo.shared import log

RESULTS = Path(__file__).parent / "results"
TOKENS_EACH = 50
KIND = WorkerKind(step_ms=60, token_us=600, max_num_seqs=16, cache_tokens=65_536)
STARTS_S = (120.0, 300.0)
OBJECTIVES = {"chat": Objective(15.0, 150.0), "documents": Objective(30.0, 250.0)}
WAITING = Metric("octavo_waiting_tokens", "External", "AverageValue", 8192.0)
CACHE = Metric("octavo_kv_cache_usage", "External", "Value", 0.8)
# The rule that was shipped first, for comparison.
FIRST = Rule(
    1,
    8,
    (WAITING, CACHE),
    Behavior(30.0, (Policy("Percent", 100, 120.0), Policy("Pods", 2, 120.0))),
    Behavior(600.0, (Policy("Pods", 1, 120.0),)),
)
CPU = Metric("cpu", "Resource", "Utilization", 0.8)


def scene(day: str, start_s: float) -> play.Scene:
    """All that the rows of one day and start have in common."""
    requests = days.DAYS[day].requests(0, TOKENS_EACH)
    kind = play.coarse_kind(KIND, TOKENS_EACH)
    return play.Scene(kind, requests, OBJECTIVES[day], start_s, TOKENS_EACH, length_s=days.DAY_S)


def rules() -> dict[str, Rule]:
    """By the name of the row. Signals alone have the shipped targets and behaviours."""
    shipped = manifest.read(manifest.SHIPPED)
    by_name = {metric.name: metric for metric in shipped.metrics}

    def alone(metric: Metric) -> Rule:
        return dataclasses.replace(shipped, metrics=(metric,))

    return {
        "shipped": shipped,
        "first rule": FIRST,
        "requests alone": alone(by_name["octavo_requests"]),
        "waiting tokens alone": alone(by_name["octavo_waiting_tokens"]),
        "cache use alone": alone(by_name["octavo_kv_cache_usage"]),
        "CPU alone": alone(CPU),
    }


def of_rule(name: str) -> Callable[[play.Scene, dict[str, Any]], Judged]:
    """Plays a row of a rule."""
    return lambda scene, known: play.with_rule(name, scene, rules()[name])


def of_ideal(scene: play.Scene, known: dict[str, Any]) -> Judged:
    """With another start known, its utilization: when workers are ordered does not change what they do."""
    found = [row["name"] for row in known.values() if row["name"].startswith("ideal")]
    if not found:
        return play.ideal(scene)
    return play.ideal(scene, utilizations=[int(found[0].partition("at ")[2].rstrip("%")) / 100])


def of_fixed(scene: play.Scene, known: dict[str, Any]) -> Judged:
    """The same for every start, so it is played once."""
    peak = max(count["arrivals_per_s"] for row in known.values() for count in row["windows"]) if known else 0.0
    return play.fixed(scene, max(1, int(peak / play.capacity(scene))))


ROWS: dict[str, Callable[[play.Scene, dict[str, Any]], Judged]] = {
    **{name: of_rule(name) for name in ("shipped", "first rule")},
    "ideal": of_ideal,
    "fixed": of_fixed,
    **{name: of_rule(name) for name in list(rules())[2:]},
}


def main() -> None:
    """Plays row by row and keeps each when it is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--day", choices=days.DAYS, action="append")
    parser.add_argument("--row", choices=ROWS, action="append")
    parser.add_argument("--start-s", type=float, choices=STARTS_S, action="append")
    arguments = parser.parse_args()
    log.configure_library("error")
    facts = machine.describe()
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-autoscaling-{machine.slug(facts)}.json"
    for name in arguments.row or ROWS:
        for day in arguments.day or days.DAYS:
            for start_s in arguments.start_s or STARTS_S:
                if name == "fixed" and start_s != STARTS_S[0]:
                    continue  # it is there from the beginning: its start does not matter
                began_s = time.perf_counter()
                known = _known(path)["days"].get(day, {})
                judged = ROWS[name](scene(day, start_s), known)
                row = {**judged.as_dict(), "start_s": start_s}
                _keep(path, facts, day, f"{name}, {start_s:.0f} s", row)
                shown = {key: value for key, value in row.items() if key != "windows"}
                print(f"{day}, {name}: {time.perf_counter() - began_s:.0f} s, {shown}", file=sys.stderr, flush=True)


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"days": {}}
    return found


def _keep(path: Path, facts: dict[str, Any], day: str, name: str, row: dict[str, Any]) -> None:
    """Beside what others kept meanwhile."""
    result = _known(path)
    workload = {
        "tokens_each": TOKENS_EACH,
        "worker": dataclasses.asdict(KIND),
        "days": {name: dataclasses.asdict(day) for name, day in days.DAYS.items()},
        "objectives": {name: dataclasses.asdict(objective) for name, objective in OBJECTIVES.items()},
        "requests_target": next(each.target for each in rules()["shipped"].metrics if each.name == "octavo_requests"),
    }
    result |= {"date": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": facts, "workload": workload}
    result["days"].setdefault(day, {})[name] = row
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
