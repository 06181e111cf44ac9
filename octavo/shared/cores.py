"""Cores that this process may compute with: those of its affinity, and no more than its control group pays for.

A container is often given "1.5 CPUs" of a machine with many: it sees all of them, and threads beyond its share are
stopped, all together, for the rest of every period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from octavo.shared.control_groups import control_groups, text_of

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
    for version, folder in control_groups("cpu", root):
        if version == 2:
            quota, _, period = text_of(folder / "cpu.max").partition(" ")
            yield from _quota(quota, period)
        else:
            yield from _quota(text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us"))


def _quota(quota: str, period: str) -> Iterator[float]:
    """Microseconds of computing in each period; "max" or a negative number: no limit."""
    try:
        if float(quota) > 0 and float(period) > 0:
            yield float(quota) / float(period)
    except ValueError:
        return
