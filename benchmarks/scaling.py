"""What more workers bring, in virtual time: the figures and pictures of docs/scaling.md.

    python -m benchmarks.scaling [--part NAME]     measures, and keeps the figures in benchmarks/results/
    python -m docs.generate                        writes the tables and pictures of the page from them

Pools of 1 to 64 equal workers with a backlog, and with random arrivals at 80 % of the rate at which one worker works
off a backlog, for each worker; what a decision costs while 10,000 requests wait; a pool of 8 that loses one worker and
gets it back; 1,000 workers behind 50 shards. Medians over seeds; the last two play one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing import OWN_BOUND_ONCE
from octavo.bench import machine, picture
from octavo.bench.fleet.figures import FleetFigures, measure
from octavo.bench.fleet.outcomes import Loss, Run
from octavo.bench.fleet.requests import Load
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.bench.picture import Chart, Series
from octavo.shared import log

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 4, 8, 16, 32, 64)
SIZES_OF_DECISIONS = (1, 8, 64)
KIND = WorkerKind(max_num_seqs=64)
MEAN_OUTPUT = 64
SECONDS_OF_ARRIVALS = 15
LOSS = Loss(0, 20.0, 40.0)
NUM_WORKERS_OF_LOSS, WINDOW_S = 8, 1.0


def load(requests: int, rate: float | None = None) -> Load:
    """Prompts of 256 tokens and outputs around MEAN_OUTPUT; `rate` None: all at once."""
    return Load(requests, prompt_tokens=256, output_tokens=MEAN_OUTPUT, spread=0.5, rate=rate)


def play(num_workers: int, asked: Load, seed: int, *losses: Loss) -> tuple[FleetFigures, Run]:
    """A pool of equal workers; the run itself has what became of each request."""
    run = Simulation([KIND] * num_workers, asked.arrivals(seed), losses, seed).run()
    return measure(run, num_workers), run


def backlog(num_workers: int, seed: int) -> FleetFigures:
    """320 requests a worker, all there from the beginning."""
    return play(num_workers, load(320 * num_workers), seed)[0]


def loaded(num_workers: int, rate: float, seed: int) -> FleetFigures:
    """`rate`: arrivals a second for each worker."""
    count = max(1000, round(SECONDS_OF_ARRIVALS * rate * num_workers))
    return play(num_workers, load(count, rate * num_workers), seed)[0]


def decisions(num_workers: int, seed: int) -> FleetFigures:
    """10,000 requests wait beside those that run; all arrive at the start."""
    return play(num_workers, load(KIND.max_num_seqs * num_workers + 10_000), seed)[0]


def loss(rate: float, seed: int) -> dict[str, Any]:
    """Throughput by the second of a pool that loses a worker, and what it does to the requests that came."""
    count = round(60 * rate * NUM_WORKERS_OF_LOSS)
    with_loss, run = play(NUM_WORKERS_OF_LOSS, load(count, rate * NUM_WORKERS_OF_LOSS), seed, LOSS)
    without, run_without = play(NUM_WORKERS_OF_LOSS, load(count, rate * NUM_WORKERS_OF_LOSS), seed)
    return {
        "with": with_loss.as_dict(),
        "without": without.as_dict(),
        "ttft_p99_ms_by_second": {"with": _by_second(run), "without": _by_second(run_without)},
    }


def _by_second(run: Run) -> list[float | None]:
    """99th percentiles of the times to the first token of requests that arrived in each second, in ms."""
    arrived_s = np.array([outcome.request.at_ns / 1e9 for outcome in run.outcomes])
    ttft_ms = np.array([outcome.ttft_ns / 1e6 for outcome in run.outcomes])
    found: list[float | None] = []
    for second in range(60):
        here = ttft_ms[(arrived_s >= second) & (arrived_s < second + WINDOW_S)]
        found.append(round(float(np.percentile(here, 99)), 1) if len(here) else None)
    return found


def medians(rows: list[FleetFigures]) -> dict[str, Any]:
    """Over runs of one size, of each figure."""
    names = rows[0].as_dict()
    return {name: statistics.median(getattr(row, name) for row in rows) for name in names}


def measure_backlog(seeds: int, known: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a size of pool."""
    return [_said("backlog", medians([backlog(size, seed) for seed in range(seeds)])) for size in SIZES]


def measure_arrivals(seeds: int, known: dict[str, Any]) -> list[dict[str, Any]]:
    """At 80 % of what one worker does with a backlog."""
    rate = 0.8 * known["backlog"][0]["tokens_per_s"] / MEAN_OUTPUT
    return [_said("at 80 %", medians([loaded(size, rate, seed) for seed in range(seeds)])) for size in SIZES]


def measure_decisions(seeds: int, known: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a size of pool, while 10,000 requests wait."""
    rows = [medians([decisions(size, seed) for seed in range(seeds)]) for size in SIZES_OF_DECISIONS]
    return [_said("10,000 wait", row) for row in rows]


def measure_loss(seeds: int, known: dict[str, Any]) -> dict[str, Any]:
    """At 80 % of what the pool does with a backlog, which must have been measured."""
    return loss(0.8 * known["backlog"][0]["tokens_per_s"] / MEAN_OUTPUT, 0)


def measure_thousand_workers(seeds: int, known: dict[str, Any]) -> dict[str, Any]:
    """As `octavo bench fleet --workers 1000 --shards 50 ...` on docs/sharding.md, which says it all."""
    kind = WorkerKind(step_ms=40, token_us=20, max_num_seqs=128)
    requests = Load(100_000, prompt_tokens=64, output_tokens=128).arrivals(0)
    run = Simulation([kind] * 1000, requests, num_shards=50).run()
    return _said("50 shards", measure(run, 1000).as_dict())


PARTS = {
    "backlog": measure_backlog,
    "at_80_percent": measure_arrivals,
    "decisions": measure_decisions,
    "loss": measure_loss,
    "thousand_workers": measure_thousand_workers,
}


def _said(name: str, row: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{name}: {row['workers']} workers, {row['tokens_per_s']:,.0f} tokens/s, first token {row['ttft_mean_ms']:,.0f}"
        f" / {row['ttft_p99_ms']:,.0f} ms, {row['decision_us_per_step']:.0f} us a step",
        file=sys.stderr,
        flush=True,
    )
    return row


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw(scaling: dict[str, Any], routing: dict[str, Any], folder: Path) -> None:
    """Writes the pictures of docs/scaling.md, from the figures of this script and of `benchmarks.routing`."""
    picture.write(folder / "pool-sizes.svg", sizes_of_pool(scaling))
    picture.write(folder / "worker-loss.svg", [lost_worker(scaling["loss"])])
    picture.write(folder / "routing-rules.svg", [routing_rules(routing)])


def sizes_of_pool(scaling: dict[str, Any]) -> list[Chart]:
    """Throughput with a backlog, and times to the first token at 80 % of it."""
    rows, arrivals = scaling["backlog"], scaling["at_80_percent"]
    first = rows[0]["tokens_per_s"]
    speed = Chart(
        "a backlog",
        "workers",
        "throughput, times one worker's",
        [
            Series("measured", SIZES, [row["tokens_per_s"] / first for row in rows]),
            Series("in proportion to workers", SIZES, SIZES),
        ],
        log_x=True,
        log_y=True,
    )
    waits = Chart(
        "arrivals at 80 % of that",
        "workers",
        "time to the first token, ms",
        [
            Series("mean", [row["workers"] for row in arrivals], [row["ttft_mean_ms"] for row in arrivals]),
            Series("99th percentile", [row["workers"] for row in arrivals], [row["ttft_p99_ms"] for row in arrivals]),
        ],
        log_x=True,
    )
    return [speed, waits]


def lost_worker(found: dict[str, Any]) -> Chart:
    """By second of arrival, with a loss and without."""
    by_second = found["ttft_p99_ms_by_second"]
    names = {"with": "one of 8 is away from 20 s to 40 s", "without": "nothing happens"}
    return Chart(
        "one worker lost and back again",
        "second of arrival",
        "time to the first token, p99, ms",
        [
            Series(name, range(60), [float("nan") if value is None else value for value in by_second[key]])
            for key, name in names.items()
        ],
    )


def routing_rules(routing: dict[str, Any]) -> Chart:
    """A point a rule and workload."""
    by_workload = routing["medians"]
    rules = [rule for rule in next(iter(by_workload.values())) if rule != OWN_BOUND_ONCE]
    beside = [0.09 * (place - (len(rules) - 1) / 2) for place in range(len(rules))]  # so that none hides another
    columns = range(len(by_workload))
    return Chart(
        "mean time to the first token by routing rule (less is better)",
        "",
        "ms",
        [
            Series(
                rule, [x + dx for x in columns], [_mean_ms(of, rule) for of in by_workload.values()], is_joined=False
            )
            for rule, dx in zip(rules, beside, strict=True)
        ],
        categories=list(by_workload),
        log_y=True,
    )


def _mean_ms(of_rules: dict[str, dict[str, float]], rule: str) -> float:
    return of_rules[rule]["ttft_mean_ms"] if rule in of_rules else float("nan")


def main() -> None:
    """Measures part by part and keeps each when it is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only that (needs a backlog of the day)")
    arguments = parser.parse_args()
    log.configure_library("error")
    facts = machine.describe()
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-scaling-{machine.slug(facts)}.json"
    for part in arguments.part or PARTS:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = PARTS[part](arguments.seeds, known)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}  # another part may have come
        result = {**known, "machine": facts, "seeds": arguments.seeds, part: found}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
