"""Cores that this process may compute with: those of its affinity, and no more than its control group pays for.

A container is often given "1.5 CPUs" of a machine with many: it sees all of them, and threads beyond its share are
stopped, all together, for the rest of every period. Linux, control groups of version 2 and 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_cores(root: Path = _ROOT) -> int:
    """At least 1. A fraction of a core is left unused: a thread that is stopped for part of
    each period holds up all that wait for it. `root` is where /proc and /sys are looked for."""
    return max(1, min([len(allowed_cores()), *(int(quota) for quota in _quotas(root))]))


def allowed_cores() -> list[int]:
    """Numbers of the cores of this process's affinity, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group around this process may use, where it is limited."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":  # version 2
            for folder in _upwards(root / "sys/fs/cgroup", path):
                quota, _, period = _text(folder / "cpu.max").partition(" ")
                yield from _quota(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root / "sys/fs/cgroup/cpu", path):
                yield from _quota(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as they are visible; a container sees its own as the top."""
    own = top / path.strip("/")
    for folder in (own, *own.parents):
        yield folder
        if folder == top:
            return


def _quota(quota: str, period: str) -> Iterator[float]:
    """Microseconds of computing in each period; "max" or a negative number: no limit."""
    try:
        if float(quota) > 0 and float(period) > 0:
            yield float(quota) / float(period)
    except ValueError:
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
