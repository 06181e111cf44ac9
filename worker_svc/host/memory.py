"""How much memory this process may still take, and how much a piece of work took at its peak. Linux; else estimates.

Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30


def available_bytes() -> int:
    """Bytes available without swapping, within the limit of this process's control group where it has one."""
    available = _field_bytes("/proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else max(min(available, int(limit) - int(used)), 0)


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory grew at its peak while `work` ran; 0 where that cannot be measured."""
    with contextlib.suppress(OSError):  # an earlier, higher peak then hides this one
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
    before = _field_bytes("/proc/self/status", "VmRSS") or 0
    work()
    after = _field_bytes("/proc/self/status", "VmHWM") or 0
    return max(after - before, 0)


def _field_bytes(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
