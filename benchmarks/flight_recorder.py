"""What the flight recorder costs a step: the real step loop over one simulated worker, with and without, in pairs.

python -m benchmarks.flight_recorder [--sequences 1000] [--pairs 5] [--json FILE]

All sequences decode at once, with prefix caching on. Microseconds are CPU time of the step loop's thread a step, all of
it: events, decisions, messages, answers. An image of the state is made once in `--flight-recorder-steps` / 2 steps and
is timed apart, as the pause that it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from octavo.bench.fleet.requests import Load
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.bench.machine import describe
from octavo.shared import log
from scheduler_svc.flight.image import image_of
from scheduler_svc.flight.recorder import FlightRecorder

PROMPT, OUTPUT = 64, 400
NUM_STEPS, NUM_BYTES = 1024, 64 << 20  # the defaults


def measure(num_sequences: int, recorded: bool) -> dict[str, float]:
    """One run: microseconds a step, and those of an image in the middle of it."""
    kind = WorkerKind(
        cache_tokens=num_sequences * (PROMPT + OUTPUT + 32), max_num_seqs=num_sequences, max_num_batched_tokens=8192
    )
    requests = Load(num_sequences, PROMPT, OUTPUT).arrivals(0)
    recorder = FlightRecorder(NUM_STEPS, NUM_BYTES) if recorded else None
    simulation = Simulation([kind], requests, new_recorder=(lambda: recorder) if recorder else None)
    engine, image_us = simulation.engines[0], list[float]()

    def picture(worker: Any, step: Any) -> None:
        if step.step.step_id in (100, 200, 300):
            began_ns = time.perf_counter_ns()
            image_of(engine.state(), {worker: 1})
            image_us.append((time.perf_counter_ns() - began_ns) / 1e3)

    if recorded:
        pictured = Simulation([kind], requests)
        engine = pictured.engines[0]
        engine.observe_steps(picture)
        pictured.run()
    run = simulation.run()
    held = sum(segment.num_bytes for segment in recorder.recording().segments) if recorder else 0
    return {
        "us_per_step": run.engine_cpu_ns / 1e3 / run.num_steps,
        "image_us": statistics.median(image_us) if image_us else 0.0,
        "bytes_per_step": held / run.num_steps,
    }


def main() -> int:
    """Prints both, and writes them where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    log.configure("error")
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(arguments.pairs):
        for name in runs:
            runs[name].append(measure(arguments.sequences, name == "on"))
    us = {name: [round(run["us_per_step"], 1) for run in each] for name, each in runs.items()}
    more = [on - off for off, on in zip(us["off"], us["on"], strict=True)]
    result = {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d"),
        "sequences": arguments.sequences,
        "us_per_step": us,
        "median_us_per_step": {name: statistics.median(each) for name, each in us.items()},
        "median_more_us": round(statistics.median(more), 1),
        "image_us": round(statistics.median(run["image_us"] for run in runs["on"])),
        "bytes_per_step": round(statistics.median(run["bytes_per_step"] for run in runs["on"])),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
