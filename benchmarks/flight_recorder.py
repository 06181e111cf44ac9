"""What the flight recorder costs a step: the real step loop over one simulated worker, with and without, in pairs.

python -m benchmarks.flight_recorder [--sequences 1000] [--pairs 5] [--json FILE]

All sequences decode at once, with prefix caching on. Microseconds are CPU time of the step loop's thread a step, all of
it: events, decisions, messages, answers. What others do on the machine moves both by more than the recorder costs, so
the calls of a step are timed alone as well, the least of many rounds. An image of the state is made once in half of
`--flight-recorder-steps`, and is timed apart, as the pause that it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.turns import rotated
from octavo.bench.fleet.replayed_worker import ReplayedLink
from octavo.bench.fleet.requests import Load
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.bench.machine import describe
from octavo.shared import log
from protos import worker_pb2
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.flight.image import image_of
from scheduler_svc.flight.recorder import FlightRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle

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
            began_ns = time.thread_time_ns()
            image_of(engine.state(), {worker: 1}, most_bytes=1 << 40)
            image_us.append((time.thread_time_ns() - began_ns) / 1e3)

    if recorded:
        pictured = Simulation([kind], requests)
        engine = pictured.engines[0]
        engine.observe_steps(picture)
        pictured.run()
    run = simulation.run()
    held = sum(segment.num_bytes for segment in recorder.recording().segments) if recorder else 0
    return {
        "us_per_step": run.engine_cpu_ns / 1e3 / run.num_steps,
        "image_us": min(image_us, default=0.0),
        "bytes_per_step": held / run.num_steps,
    }


def own_us(num_sequences: int, num_clock_reads: int = 14, num_rounds: int = 20) -> float:
    """What is told the recorder of one step, by itself: the least of so many rounds of 500 steps."""
    link = ReplayedLink(1, lambda number, step: None)
    info, sizes = worker_pb2.WorkerInfo(block_size=16), worker_pb2.InitializeResponse(max_num_seqs=1, max_model_len=64)
    worker = WorkerHandle(link, info, sizes, worker_pb2.LeaseGranted(epoch=1), SchedulerSettings())
    rows: Any = SimpleNamespace(num_beam_rows=0)
    outputs: Any = SimpleNamespace(introductions=[])
    answer: Any = None
    data, best_us = bytes(4 * num_sequences), float("inf")
    for _ in range(num_rounds):
        recorder = FlightRecorder(1 << 30, 1 << 40)
        clock = recorder.clock(time.monotonic_ns)
        recorder.joined(worker, worker_pb2.LeaseGranted())
        began_ns = time.thread_time_ns()
        for step in range(500):
            recorder.said(worker, data)
            recorder.asks(rows, answer)
            recorder.turn()
            for _ in range(num_clock_reads):
                clock()
            recorder.sent(worker, outputs, step, data)
            recorder.turned()
        best_us = min(best_us, (time.thread_time_ns() - began_ns) / 500e3)
    return best_us


def main() -> int:
    """Prints both, and writes them where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    log.configure("error")
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for number in range(arguments.pairs):
        for name in rotated(runs, number):
            runs[name].append(measure(arguments.sequences, name == "on"))
    us = {name: [round(run["us_per_step"], 1) for run in each] for name, each in runs.items()}
    more = [on - off for off, on in zip(us["off"], us["on"], strict=True)]
    alone_us = own_us(arguments.sequences)
    result = {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d"),
        "sequences": arguments.sequences,
        "us_per_step": us,
        "median_us_per_step": {name: statistics.median(each) for name, each in us.items()},
        "least_us_per_step": {name: min(each) for name, each in us.items()},
        "median_more_us": round(statistics.median(more), 1),
        "recorder_alone_us_per_step": round(alone_us, 1),
        "image_us": round(min(run["image_us"] for run in runs["on"])),
        "bytes_per_step": round(statistics.median(run["bytes_per_step"] for run in runs["on"])),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
