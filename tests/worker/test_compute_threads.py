"""Threads that compute, and when they leave some cores to others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from kernels.cpu.library import library
from octavo.shared.cores import allowed_cores
from tests.worker.fake_model import fake_config
from worker_svc.config import WorkerConfig
from worker_svc.host import compute_threads
from worker_svc.host.busy_cores import CoreTimes, read_core_times, used_by_others
from worker_svc.host.compute_threads import bfloat16_instructions, log_arithmetic, set_threads
from worker_svc.steps.giving_way import STALE_S, WINDOW_S, GivingWay, may_give_way

CPU = torch.device("cpu")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_own_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.mark.parametrize(
    ("config", "local_size", "openmp", "expected"),
    [
        (WorkerConfig(num_threads=3), 1, "1", 3),
        (WorkerConfig(), 1, "", 4),
        (WorkerConfig(), 2, "", 2),
        (WorkerConfig(), 8, "", 1),
        (WorkerConfig(), 1, "3,2", 3),
        (WorkerConfig(), 2, "3", 2),
        (WorkerConfig(), 1, "0", 4),
    ],
)
def test_as_many_threads_compute_as_there_are_cores_for_each_rank(
    config: WorkerConfig, local_size: int, openmp: str, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compute_threads, "available_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)

    def set_and_count() -> int:
        torch.set_num_threads(1)  # as torch counts where two hardware threads of a core are two processors
        set_threads(config, local_size)
        return torch.get_num_threads()

    assert in_own_thread(set_and_count) == expected


@pytest.mark.parametrize(("level", "severity"), [("avx512-bf16", "info"), ("plain", "warning")])
def test_a_line_of_the_log_names_the_instructions(level: str, severity: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library(), "level", level)
    with capture_logs() as lines:
        log_arithmetic(CPU, torch.bfloat16)
    assert [(line["log_level"], line["dtype"], line["instructions"]) for line in lines] == [
        (severity, "bfloat16", level)
    ]


@pytest.mark.parametrize(
    ("level", "has_pairs", "dtype", "told"),
    [
        ("amx", True, torch.bfloat16, "amx"),
        ("avx512-bf16", True, torch.bfloat16, "avx512-bf16"),
        ("avx2", False, torch.bfloat16, ""),  # one order of sums where there are no such instructions
        ("amx", True, torch.float32, ""),
    ],
)
def test_workers_in_bfloat16_are_told_apart_by_instructions(
    level: str, has_pairs: bool, dtype: torch.dtype, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(library(), "level", level)
    monkeypatch.setattr(library(), "has_pairs", has_pairs)
    assert bfloat16_instructions(CPU, dtype) == told
    assert bfloat16_instructions(torch.device("cuda"), dtype) == ""


class Readings:
    """What the system says of cores that others use as much of as `used` says."""

    def __init__(self) -> None:
        self.used, self.now = 0.0, 100.0
        self._all_processes, self._this_process = 50.0, 7.0

    def pass_by(self, seconds: float, own: float = 1.0) -> None:
        self.now += seconds
        self._all_processes += (self.used + own) * seconds
        self._this_process += own * seconds

    def __call__(self) -> CoreTimes:
        return CoreTimes(self.now, self._all_processes, self._this_process)


def giving_way(most: int, readings: Readings, num_cores: int) -> GivingWay:
    torch.set_num_threads(most)
    return GivingWay(readings, num_cores, lambda: readings.now)


def threads_beside(used: float, adapting: GivingWay, readings: Readings) -> int:
    readings.used = used
    readings.pass_by(WINDOW_S)
    adapting.adapt()
    return torch.get_num_threads()


def test_threads_leave_cores_that_others_keep_busy_and_come_back():
    readings = Readings()
    adapting = giving_way(2, readings, num_cores=2)
    used = [0.3, 0.7, 0.9, 0.7, 0.3, 2.0, 0.7, 0.0]
    assert [threads_beside(each, adapting, readings) for each in used] == [2, 2, 1, 1, 2, 1, 1, 2]


@pytest.mark.parametrize(("used", "threads"), [(0.5, 16), (1.0, 15), (4.1, 12), (7.9, 8), (15.9, 8), (40.0, 8)])
def test_one_thread_gives_way_for_each_core_that_is_busy_and_half_of_them_stay(used: float, threads: int):
    readings = Readings()
    assert threads_beside(used, giving_way(16, readings, num_cores=16), readings) == threads


def test_nobody_gives_way_while_other_cores_are_idle():
    readings = Readings()
    assert threads_beside(3.0, giving_way(4, readings, num_cores=8), readings) == 4


def test_a_moment_and_an_idle_time_say_nothing():
    readings = Readings()
    adapting = giving_way(2, readings, num_cores=2)
    readings.used = 2.0
    readings.pass_by(WINDOW_S / 2)
    adapting.adapt()
    assert torch.get_num_threads() == 2
    readings.pass_by(STALE_S, own=0.1)
    adapting.adapt()
    assert torch.get_num_threads() == 2
    assert threads_beside(2.0, adapting, readings) == 1, "the next window counts"


def test_steps_that_take_long_are_looked_at_too():
    readings = Readings()
    adapting = giving_way(2, readings, num_cores=2)
    for used, threads in ((1.0, 1), (0.2, 2)):
        readings.used = used
        readings.pass_by(10 * STALE_S, own=0.5)
        adapting.adapt()
        assert torch.get_num_threads() == threads


def test_more_threads_than_cores_stay_where_nobody_else_is():
    readings = Readings()
    assert threads_beside(0.2, giving_way(4, readings, num_cores=2), readings) == 4


def test_a_system_that_does_not_say_keeps_the_threads(tmp_path: Path):
    for text in ("cpu  1 1 1 1 1 1 1\n", "cpu7 1 1 1 1 1 1 1 1 0 0\n", "cpu0 1 1\n", "cpu0 a b c d e f g\n"):
        (tmp_path / "stat").write_text(text)
        assert read_core_times([0], tmp_path / "stat") is None
    assert read_core_times([0], tmp_path / "missing") is None
    torch.set_num_threads(2)
    adapting = GivingWay(lambda: None, num_cores=2)
    adapting.adapt()
    assert torch.get_num_threads() == 2


def test_times_of_the_cores_that_were_asked_for(tmp_path: Path):
    stat = tmp_path / "stat"
    #                          user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text("cpu  999 0 0 0 0 0 0 0 0 0\ncpu0 100 50 20 900 9 3 7 60 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 5\n")
    times = read_core_times([0], stat)
    assert times is not None
    ticks = 180 if os.nice(0) > 0 else 130
    assert times.all_processes == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_a_process_of_lower_priority_counts_others_of_lower_priority(tmp_path: Path):
    (tmp_path / "stat").write_text("cpu0 100 50 20 900 9 3 7 60 0 0\n")
    program = f"""
import os, pathlib
from worker_svc.host.busy_cores import read_core_times
stat = pathlib.Path({str(tmp_path / "stat")!r})
print(read_core_times([0], stat).all_processes)
os.nice(1)
print(read_core_times([0], stat).all_processes)
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    usual, lower = (round(float(line) * os.sysconf("SC_CLK_TCK")) for line in done.stdout.split())
    assert lower == 180 and usual == (180 if os.nice(0) > 0 else 130)


@pytest.mark.usefixtures("core_times_are_counted")
def test_a_busy_process_is_seen_and_the_own_time_is_not_counted():
    """Beside what psutil says of the other process; that may be less than all that others use."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            process, cores = psutil.Process(other.pid), allowed_cores()
            before, used_before = read_core_times(cores), process.cpu_times().user
            until = time.process_time() + 1.0
            while time.process_time() < until:  # as busy as the other
                pass
            after, used_after = read_core_times(cores), process.cpu_times().user
        finally:
            other.kill()
    assert before is not None and after is not None
    used = (used_after - used_before) / (after.now - before.now)
    assert used_by_others(before, after) > used - 0.2 and used > 0.05


def test_nothing_is_used_by_others_where_this_process_used_all():
    before, after = CoreTimes(10.0, 20.0, 5.0), CoreTimes(11.0, 21.0, 6.0)
    assert used_by_others(before, after) == 0.0
    assert used_by_others(before, CoreTimes(11.0, 21.5, 6.0)) == 0.5


@pytest.mark.parametrize(
    ("device", "impl", "may"),
    [
        (CPU, "octavo", True),
        (torch.device("cuda"), "octavo", False),
        (CPU, "transformers", False),
    ],
)
def test_the_number_changes_only_where_it_changes_no_bit(device, impl, may):
    model = replace(fake_config(), impl=impl, dtype=torch.bfloat16)
    assert in_own_thread(lambda: may_give_way(model, device)) is may


def test_threads_that_are_bound_to_cores_stay():
    model, allowed = fake_config(), allowed_cores()
    if len(allowed) == 1:
        pytest.skip("a thread on the only core looks like any other")

    def may() -> bool:
        os.sched_setaffinity(0, allowed[:1])  # as OpenMP does with OMP_PROC_BIND
        return may_give_way(model, CPU)

    assert not in_own_thread(may)
