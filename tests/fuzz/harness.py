"""Services as processes with a good client beside them, and what must still be true after each batch of cases.

answers   the neighbour's are those that it got undisturbed
silence   it never waits longer than a second between two tokens of a stream
memory    of every process grows by no more than its noise
nothing   is left: requests, blocks
the log   holds no traceback and no error
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from octavo.shared.ports import free_port
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.chaos.scheduler_process import SchedulerProcess
from tests.chaos.worker_process import WorkerProcess
from tests.fuzz.cases import Targets, drawn
from tests.tiny_models import make_tiny_llama

AT_ONCE = 6  # attackers
MOST_SILENCE_S = 3.0  # with every core taken by others, too; on a quiet machine it is a tenth of that
# More than what gRPC's core keeps of a call whose connection ends as it begins, with Octavo around it or without: see
# docs/requests.md.
BYTES_A_BROKEN_CALL = 3072
MOST_BYTES_OF_NOISE = 80 * 2**20  # pools that fill late, 51 MiB of keys and values among them, and fragmentation
WORKER_OPTIONS = ("--max-model-len=4096", "--max-num-seqs=32", "--max-num-batched-tokens=256", "--kv-cache-memory=0.05")
FAULT_MARKS = ("Traceback", '"level": "error"', '"exception"')


@dataclass
class Report:
    """What a run came to. `faults` is empty where all held."""

    num_cases: int
    statuses: dict[str, int]
    neighbour: dict[str, Any]
    grown_bytes: dict[str, int]
    faults: list[str]


class Bench:
    """A scheduler with one worker, another worker that is free, and the neighbour."""

    def __init__(
        self, targets: Targets, logs: list[Path], pids: dict[str, int], neighbour: subprocess.Popen[str]
    ) -> None:
        self.targets = targets
        self.logs, self._neighbour = logs, neighbour
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._faults: list[str] = []
        self._num_cases = 0
        self._readings: list[dict[str, int]] = []  # of resident bytes, after each batch

    def run(self, seed: int, first: int, count: int) -> None:
        """So many cases, some at once. Those that raise are named by seed and number."""
        asyncio.run(self._run(seed, first, count))

    async def _run(self, seed: int, first: int, count: int) -> None:
        numbers = iter(range(first, first + count))
        targets = Targets(*self._addresses)

        async def attacker() -> None:
            for number in numbers:
                case, chance = drawn(seed, number)
                try:
                    await case(targets, chance)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"[:400]
                    self._faults.append(f"case {seed}:{number} ({case.__name__}): {what}")

        try:
            await asyncio.gather(*(attacker() for _ in range(AT_ONCE)))
        finally:
            await targets.close()
        self.targets.statuses += targets.statuses
        self.targets.broken_off += targets.broken_off
        self._num_cases += count
        self._readings.append(self.resident_bytes())

    @property
    def _addresses(self) -> tuple[str, str, str, str]:
        return self.targets.scheduler, self.targets.worker, self.targets.free_worker, self.targets.metrics

    def report(self) -> Report:
        """Ends the neighbour, and looks at everything."""
        assert self._neighbour.stdin is not None and self._neighbour.stdout is not None
        self._neighbour.stdin.close()
        fared = json.loads(self._neighbour.stdout.readline() or "{}")
        faults = [*self._faults, *_faults_of(fared)]
        with _noted(faults):
            wait_until_nothing_is_left(self.targets.scheduler, counts_calls=False)
        time.sleep(1.0)  # memory of connections that have just been closed
        self._readings.append(self.resident_bytes())
        grown = growth(self._readings)
        kept = {"scheduler": self.targets.scheduler, "worker": self.targets.worker}
        for name, num_bytes in grown.items():
            if num_bytes > MOST_BYTES_OF_NOISE + BYTES_A_BROKEN_CALL * self.targets.broken_off[kept.get(name, "")]:
                faults.append(f"{name} grew by {num_bytes >> 20} MiB")
        faults += faults_in(self.logs)
        return Report(self._num_cases, dict(self.targets.statuses), fared, grown, faults)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes by name; with those of a process's children, which come and go."""
        found = {}
        for name, process in self._processes.items():
            each = [process, *process.children(recursive=True)]
            found[name] = sum(_resident_bytes(one) for one in each)
        return found


def faults_in(logs: list[Path]) -> list[str]:
    """Lines that a log may not have, with its name."""
    return [
        f"{log.name}: {line[:600]}"
        for log in logs
        for line in log.read_text(errors="replace").splitlines()
        if any(mark in line for mark in FAULT_MARKS)
    ]


def growth(readings: list[dict[str, int]]) -> dict[str, int]:
    """Since the first of them, which ends the warm-up. What is kept is there at each of the last quarter, and what
    several large messages take at once is not."""
    last = readings[-max(2, len(readings) // 4) :]
    return {name: min(each[name] for each in last) - before for name, before in readings[0].items()}


def make_model(folder: Path) -> Path:
    return make_tiny_llama(folder, max_position_embeddings=4096)


@contextlib.contextmanager
def bench(model: Path, logs: Path, *scheduler_options: str) -> Iterator[Bench]:
    """Everything started and the neighbour under way. `model`: a folder."""
    workers: list[WorkerProcess] = []
    schedulers: list[SchedulerProcess] = []
    neighbour: subprocess.Popen[str] | None = None
    try:
        for name in ("worker", "free-worker"):
            workers.append(
                WorkerProcess([f"--model={model}", "--num-threads=1", *WORKER_OPTIONS], logs / f"{name}.log")
            )
        for worker in workers:
            worker.wait_until_ready()
        metrics = free_port()
        options = (f"--metrics-port={metrics}", "--log-level=warning", "--text-processes=2", *scheduler_options)
        address = f"127.0.0.1:{workers[0].port}"
        # Its own children, whose memory is looked at.
        schedulers.append(SchedulerProcess([address], options, logs / "scheduler.log", forks_children=False))
        schedulers[0].wait_for_workers(1)
        command = [sys.executable, "-m", "tests.fuzz.neighbour", schedulers[0].address]
        neighbour = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "ready\n", "the neighbour was not served"
        targets = Targets(schedulers[0].address, address, f"127.0.0.1:{workers[1].port}", f"127.0.0.1:{metrics}")
        pids = {"scheduler": schedulers[0].pid, "worker": workers[0].pid, "free worker": workers[1].pid}
        yield Bench(targets, sorted(logs.glob("*.log")), pids, neighbour)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
        for scheduler in schedulers:
            scheduler.stop()
        for worker in workers:
            worker.end()


def _faults_of(fared: dict[str, Any]) -> list[str]:
    if not fared:
        return ["the neighbour died"]
    faults = [*fared["wrong"], *fared["errors"]]
    if fared["longest_gap"] > MOST_SILENCE_S:
        when = time.strftime("%H:%M:%S", time.gmtime(fared["longest_gap_at"]))
        faults.append(f"the neighbour heard nothing for {fared['longest_gap']:.2f} s until {when} UTC")
    if not fared["num_answers"]:
        faults.append("the neighbour was not served once")
    return faults


@contextlib.contextmanager
def _noted(faults: list[str]) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        faults.append(str(error))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
