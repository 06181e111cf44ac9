"""Which worker should get a request? Octavo's rule beside others, over the simulator of `octavo bench fleet`.

    python -m benchmarks.routing [--seeds N] [--workload NAME] [--rule NAME]

Eight workers with seven workloads; medians over seeds of mean and 99th percentile of the time to the first token, of
the share of prompt tokens found in caches, and of balance. Keeps them in benchmarks/results/, beside what was measured
of other workloads or rules on the same day.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import mooncake_like
from benchmarks.routing_rules import RULES, use
from octavo.bench import machine
from octavo.bench.fleet import traces
from octavo.bench.fleet.figures import FleetFigures, measure
from octavo.bench.fleet.outcomes import Loss
from octavo.bench.fleet.requests import Load, Request
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.shared import log

RESULTS = Path(__file__).parent / "results"
NUM_WORKERS = 8
# Prompts at 11,400 tokens/s in full steps, a token of 64 sequences every 20 ms: about an 8-B model on a large card.
KIND = WorkerKind(step_ms=15.0, token_us=80.0)
OWN, OWN_BOUND_ONCE = "Octavo", "Octavo, bound once"
SHOWN = ("ttft_mean_ms", "ttft_p99_ms", "cache_hit_rate", "balance", "tokens_per_s", "between_tokens_p99_ms", "failed")


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests, the pool that gets them, and which of its workers are lost meanwhile."""

    what: str
    requests: Callable[[int], list[Request]]  # of a seed
    pool: tuple[WorkerKind, ...] = (KIND,) * NUM_WORKERS
    losses: tuple[Loss, ...] = ()


def _conversations(seed: int) -> list[Request]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        lines = mooncake_like.entries(500, seed)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        return traces.read(path)


SMALL = dataclasses.replace(KIND, speed=0.5, cache_tokens=76_800, max_num_seqs=64)
SLOW = dataclasses.replace(KIND, speed=0.25)
TENANTS = Load(requests=1600, shared_tokens=6000, tenants=150, prompt_tokens=200, output_tokens=24, spread=0.5, rate=40)
TURNS = Load(requests=250, prompt_tokens=1200, output_tokens=60, turns=5, think_s=8.0, spread=0.5)

WORKLOADS = {
    "one prompt": Workload(
        "one system prompt of 1,024 tokens before 256 of each request's own, 120 requests/s",
        Load(requests=2000, shared_tokens=1024, prompt_tokens=256, output_tokens=32, spread=0.5, rate=120).arrivals,
    ),
    "150 tenants": Workload("150 tenants with 6,000 tokens each, 40 requests/s", TENANTS.arrivals),
    "conversations": Workload(
        "a trace made like Mooncake's conversations, raw ticks of 3 s; workers half as fast",
        _conversations,
        pool=(dataclasses.replace(KIND, speed=0.5),) * NUM_WORKERS,
    ),
    "mixed sizes": Workload(
        "conversations of 5 turns, 6 beginning a second; 4 of the workers have half the speed, a quarter of the cache",
        dataclasses.replace(TURNS, rate=6.0).arrivals,
        pool=(KIND, SMALL) * (NUM_WORKERS // 2),
    ),
    "one slow": Workload(
        "400 tokens each, nothing shared, 100 requests/s; one worker has a quarter of the speed",
        Load(requests=2000, prompt_tokens=400, output_tokens=32, spread=0.5, rate=100).arrivals,
        pool=(SLOW,) + (KIND,) * (NUM_WORKERS - 1),
    ),
    "idle": Workload(
        "one request every 5 s, 20 tenants with 2,000 tokens each",
        Load(requests=200, shared_tokens=2000, tenants=20, prompt_tokens=200, output_tokens=32, rate=0.2).arrivals,
    ),
    "loss": Workload(
        "as 150 tenants; one worker is lost after 15 s and comes back after 30 s",
        TENANTS.arrivals,
        losses=(Loss(0, 15.0, 30.0),),
    ),
}


def play(workload: Workload, rule: str, seed: int) -> FleetFigures:
    """One run of a workload by a rule."""
    simulation = Simulation(workload.pool, workload.requests(seed), workload.losses, seed)
    if rule == OWN_BOUND_ONCE:
        simulation.engines[0]._rebinding.is_due = lambda worker: False  # type: ignore[method-assign]  # bound once
    elif rule != OWN:
        use(simulation.engines[0], RULES[rule](), seed)
    return measure(simulation.run(), len(workload.pool))


def medians(figures: list[FleetFigures]) -> dict[str, float]:
    """Over seeds, of each figure that is shown."""
    return {name: statistics.median(getattr(each, name) for each in figures) for name in SHOWN}


def table(workload: str, found: dict[str, dict[str, float]]) -> str:
    """A Markdown table, a row a rule."""
    lines = [f"{workload}: {WORKLOADS[workload].what}", "", "| rule | first token mean / p99, s | cached | balance |"]
    lines.append("| --- | --- | --- | --- |")
    for rule, values in found.items():
        mean_s, p99_s = values["ttft_mean_ms"] / 1e3, values["ttft_p99_ms"] / 1e3
        hits, balance = 100 * values["cache_hit_rate"], values["balance"]
        lines.append(f"| {rule} | {mean_s:.2f} / {p99_s:.2f} | {hits:.0f} % | {balance:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Prints a table a workload; keeps the medians in benchmarks/results/."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rule", choices=(*RULES, OWN, OWN_BOUND_ONCE), action="append")
    arguments = parser.parse_args()
    log.configure_library("error")
    facts = machine.describe()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.workload or WORKLOADS:
        found[name] = {}
        for rule in arguments.rule or (*RULES, OWN_BOUND_ONCE, OWN):
            found[name][rule] = medians([play(WORKLOADS[name], rule, seed) for seed in range(arguments.seeds)])
        print(table(name, found[name]), flush=True)
        print(flush=True)
    keep(facts, arguments.seeds, found)


def keep(facts: dict[str, Any], num_seeds: int, found: dict[str, dict[str, dict[str, float]]]) -> Path:
    """Writes what was found into benchmarks/results/: into today's file, where that has as many seeds."""
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-routing-{machine.slug(facts)}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = before["medians"] if before.get("seeds") == num_seeds else {}
    merged: dict[str, dict[str, dict[str, float]]] = {}
    for name in WORKLOADS:
        by_rule = {**known.get(name, {}), **found.get(name, {})}
        if by_rule:
            merged[name] = {rule: by_rule[rule] for rule in (*RULES, OWN_BOUND_ONCE, OWN) if rule in by_rule}
    whats = {name: workload.what for name, workload in WORKLOADS.items()}
    result = {"machine": facts, "seeds": num_seeds, "workloads": whats, "medians": merged}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
