"""How much memory a worker may still take, from made-up machines and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_svc.host.memory import GIB, available_bytes, peak_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """16 GiB are available; this process is in no group yet."""
    available_kib = 16 * GIB // 1024
    write(tmp_path, {"proc/meminfo": f"MemTotal:  99999999 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total: 0"})
    return tmp_path


def group_of_version_2(root: Path, path: str, limit: int | str, used: int, stat: str = "") -> None:
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    files = {"memory.max": str(limit), "memory.current": str(used), "memory.stat": stat}
    write(root, {f"{folder}/{name}": text for name, text in files.items()})


def test_a_process_in_no_group_may_take_what_the_machine_has(machine: Path) -> None:
    assert available_bytes(machine) == 16 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(8 * GIB, 3 * GIB, 5 * GIB), ("max", 3 * GIB, 16 * GIB), (40 * GIB, GIB, 16 * GIB), (2 * GIB, 3 * GIB, 0)],
)
def test_a_container_has_less(machine: Path, limit: int | str, used: int, expected: int) -> None:
    write(machine, {"proc/self/cgroup": "0::/"})
    group_of_version_2(machine, "", limit, used)
    assert available_bytes(machine) == expected


def test_cached_files_are_no_memory_that_is_taken(machine: Path) -> None:
    """A container that has just fetched a model: nearly all that counts as used are pages of its file."""
    write(machine, {"proc/self/cgroup": "0::/"})
    stat = f"anon {GIB // 2}\nfile {7 * GIB}\nshmem {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}"
    group_of_version_2(machine, "", 8 * GIB, 7 * GIB + GIB // 2, stat)
    assert available_bytes(machine) == 6 * GIB + GIB // 2  # pages of shared memory stay


def test_the_tightest_of_all_groups_around_counts(machine: Path) -> None:
    """As systemd's `MemoryMax` for a service, and a limit of the slice that it is in."""
    write(machine, {"proc/self/cgroup": "0::/system.slice/octavo.service"})
    group_of_version_2(machine, "system.slice/octavo.service", 6 * GIB, GIB)
    assert available_bytes(machine) == 5 * GIB
    group_of_version_2(machine, "system.slice", 8 * GIB, 5 * GIB)
    assert available_bytes(machine) == 3 * GIB
    group_of_version_2(machine, "other.slice", GIB, GIB)
    assert available_bytes(machine) == 3 * GIB


@pytest.mark.parametrize("path", ["/docker/4f2c", "/"])
def test_groups_of_the_first_version(machine: Path, path: str) -> None:
    """A container sees the path that its group has outside, and its own group as the top."""
    write(machine, {"proc/self/cgroup": f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n0::/"})
    files = {
        "memory.limit_in_bytes": str(8 * GIB),
        "memory.usage_in_bytes": str(7 * GIB),
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {3 * GIB}\ntotal_active_file {GIB}",
    }
    write(machine, {f"sys/fs/cgroup/memory/{name}": text for name, text in files.items()})
    assert available_bytes(machine) == 5 * GIB
    write(machine, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})  # none
    assert available_bytes(machine) == 16 * GIB


@pytest.mark.parametrize("nonsense", ["", "much", "-1", "1.5"])
def test_what_cannot_be_read_limits_nothing(machine: Path, nonsense: str) -> None:
    write(machine, {"proc/self/cgroup": "0::/\n0::/gone\nnonsense", "sys/fs/cgroup/memory.max": nonsense})
    assert available_bytes(machine) == 16 * GIB
    group_of_version_2(machine, "", nonsense, GIB, "\n")
    assert available_bytes(machine) == 16 * GIB


def test_a_system_without_proc_says_what_it_has_in_all(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0


def test_the_peak_of_a_piece_of_work_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr("worker_svc.host.memory._STATUS", status)
    status.write_text("Name:\tpython\nVmHWM:\t     900 kB\nVmRSS:\t     400 kB\n")
    grown = "Name:\tpython\nVmHWM:\t     950 kB\nVmRSS:\t     500 kB\n"
    assert peak_bytes(lambda: status.write_text(grown)) == 550 * 1024
    assert peak_bytes(status.unlink) == 0
