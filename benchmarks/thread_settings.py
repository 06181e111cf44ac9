"""How many threads a worker should compute with, and how they should wait: `python -m benchmarks.thread_settings`.

A thread that spins at a barrier is quick on an idle machine and costs milliseconds on one where scheduler, client or a
neighbour want the core. In each round every setting gets a server of its own, alone and beside a busy neighbour. The
neighbour's processor time is measured too: it should cost no more than that. Medians are shown.
`octavo.serving.plan.worker_environment` has the setting that was chosen, `worker_svc.steps.giving_way` the rule by
which a worker computes with fewer threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.served import over_generate, served, wait_until_ready
from octavo.bench import machine, workloads
from octavo.shared.cores import available_cores

RESULTS = Path(__file__).parent / "results"
# libgomp reads GOMP_SPINCOUNT before OMP_WAIT_POLICY: rounds of spinning before a waiting thread sleeps.
SETTINGS = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 20,000": {"GOMP_SPINCOUNT": "20000"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
}
CHOSEN = "spin 1,000"  # what workers are started with: `octavo.serving.plan.SPIN_COUNT`


def main() -> int:
    """Prints medians by setting; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Compares thread counts and ways of waiting.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=["W1", "W2"])
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()

    facts = machine.describe()
    speeds: dict[str, list[float]] = {}
    cores_taken: dict[str, list[float]] = {}  # by neighbours
    for number in range(arguments.rounds):
        for threads in sorted({1, available_cores()}):
            for setting, environment in SETTINGS.items():
                if threads == 1 and setting != "passive":
                    continue  # one thread never waits
                with served(arguments.model, "--num-threads", str(threads), environment=environment) as address:
                    wait_until_ready(address)
                    over_generate(address, workloads.warm_up(arguments.vocab_size))
                    for neighbours in (0, 1):
                        with _busy(neighbours) as processes:
                            for name in arguments.workloads:
                                started_s, used_s = time.monotonic(), _processor_time_s(processes)
                                row = over_generate(address, workloads.make(name, arguments.vocab_size))
                                taken = (_processor_time_s(processes) - used_s) / (time.monotonic() - started_s)
                                key = f"{name} | {threads} | {setting} | {neighbours}"
                                speeds.setdefault(key, []).append(row.output_tokens_per_s)
                                cores_taken.setdefault(key, []).append(taken)
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)

    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-threads-{machine.slug(facts)}.json"
        figures = {"output_tokens_per_s": speeds, "cores_taken_by_neighbours": cores_taken}
        path.write_text(json.dumps({"date": date, "machine": facts, **figures}, indent=1) + "\n")
    print(table(speeds, cores_taken, available_cores()))
    return 0


def table(speeds: dict[str, list[float]], cores_taken: dict[str, list[float]], num_cores: int) -> str:
    """Medians. Beside neighbours also: the share of the speed alone that is kept, the part of the cores that the
    neighbours did not use, and the part that would be left if every thread on the machine had an equal share.

    `speeds`: tokens/s of each round by "workload | threads | waiting | neighbours"; `cores_taken` by the same.
    """
    lines = ["| workload | threads | waiting | busy neighbours | tokens/s | left | cores not taken | fair |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for key in sorted(speeds):
        setting, neighbours = key.rsplit(" | ", 1)
        left = not_taken = fair = "-"
        if neighbours != "0":
            alone = speeds[f"{setting} | 0"]
            pairs = zip(speeds[key], alone, strict=True)
            left = f"{statistics.median(beside / one for beside, one in pairs):.2f}"
            not_taken = f"{1 - statistics.median(cores_taken[key]) / num_cores:.2f}"
            fair = f"{fair_share(num_cores, int(setting.split(' | ')[1]), int(neighbours)):.2f}"
        lines.append(f"| {key} | {statistics.median(speeds[key]):.1f} | {left} | {not_taken} | {fair} |")
    return "\n".join(lines)


def fair_share(num_cores: int, num_threads: int, num_neighbours: int) -> float:
    """The part of the machine that `num_threads` threads get if all threads on it get equal parts of its cores."""
    return min(num_cores / (num_threads + num_neighbours), 1.0)


@contextmanager
def _busy(count: int) -> Iterator[list[psutil.Popen]]:
    """So many processes that compute without end."""
    processes = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _processor_time_s(processes: list[psutil.Popen]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


if __name__ == "__main__":
    sys.exit(main())
