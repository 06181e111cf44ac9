"""How many threads a worker gets, from made-up machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.serving import plan as serving_plan
from octavo.serving.plan import ServeConfig, plan
from octavo.shared import cores
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def write(root: Path, **files: str) -> Path:
    """Files whose names have __ for / and _DOT_ for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(("allowed", "expected"), [({0}, 1), ({1, 5}, 2), (set(range(16)), 16)])
def test_cores_of_the_affinity(monkeypatch, tmp_path, allowed, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    assert cores.available_cores(tmp_path) == expected


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_a_container_pays_for_fewer(tmp_path, limit, expected):
    write(tmp_path, proc__self__cgroup="0::/", sys__fs__cgroup__cpu_DOT_max=limit)
    assert cores.available_cores(tmp_path) == expected


@pytest.mark.usefixtures("sixteen_cores")
def test_the_smallest_share_of_all_groups_around_counts(tmp_path):
    write(
        tmp_path,
        proc__self__cgroup="0::/pod/container",
        sys__fs__cgroup__pod__container__cpu_DOT_max="800000 100000",
        sys__fs__cgroup__pod__cpu_DOT_max="600000 200000",
        sys__fs__cgroup__cpu_DOT_max="max 100000",
    )
    assert cores.available_cores(tmp_path) == 3


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("250000", 2)])
def test_groups_of_the_first_version(tmp_path, quota, expected):
    group = "sys__fs__cgroup__cpu__box__cpu_DOT_cfs_"
    files = {f"{group}quota_us": quota, f"{group}period_us": "100000"}
    write(tmp_path, proc__self__cgroup="5:memory:/other\n4:cpu,cpuacct:/box", **files)
    assert cores.available_cores(tmp_path) == expected


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("nonsense", ["", "one two", "100000", "nan 1"])
def test_what_cannot_be_read_limits_nothing(tmp_path, nonsense):
    write(tmp_path, proc__self__cgroup="0::/gone\n0::/../outside\nnonsense", sys__fs__cgroup__cpu_DOT_max=nonsense)
    assert cores.available_cores(tmp_path) == 16


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "asked", "threads"),
    [(1, 1, 0, 1), (2, 1, 0, 2), (16, 1, 0, 16), (16, 3, 0, 5), (2, 4, 0, 1), (16, 2, 3, 3)],
)
def test_workers_divide_the_cores_and_say_so_to_openmp(monkeypatch, num_cores, num_workers, asked, threads):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serving_plan, "available_cores", lambda: num_cores)
    _, (_, *workers) = plan(ServeConfig(workers=num_workers), SchedulerConfig(port=0), WorkerConfig(num_threads=asked))
    for worker in workers:
        assert f"--num-threads={threads}" in worker.command
        assert worker.environment["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("asked", "told"), [(0, False), (3, True)])
def test_a_number_of_threads_in_the_environment_is_left_to_workers(monkeypatch, asked, told):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, (_, worker) = plan(ServeConfig(), SchedulerConfig(port=0), WorkerConfig(num_threads=asked))
    assert worker.environment["OMP_NUM_THREADS"] == "1"
    assert any("--num-threads" in argument for argument in worker.command) == told
