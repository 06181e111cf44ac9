"""How much memory this process may still take, and how much a piece of work took at its peak. Linux; else estimates.

Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.shared.control_groups import control_groups, text_of

GIB = 1 << 30
_ROOT = Path("/")
_STATUS = Path("/proc/self/status")


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes available without swapping, within the limits of all control groups around this process. `root` is where
    /proc and /sys are looked for."""
    available = _field_bytes(root / "proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min([available, *_left_to_groups(root)]), 0)


def _left_to_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group around this process may still take, where it is limited."""
    for version, folder in control_groups("memory", root):
        if version == 2:
            limit, used, of_all = text_of(folder / "memory.max"), text_of(folder / "memory.current"), ""
        else:  # `total_`: with the groups below it
            limit, used = text_of(folder / "memory.limit_in_bytes"), text_of(folder / "memory.usage_in_bytes")
            of_all = "total_"
        if limit.isdecimal() and used.isdecimal():  # "max": no limit
            # Pages of files count as used, and are given up where memory is needed.
            kinds = f"{of_all}inactive_file", f"{of_all}active_file"
            of_files = sum(_field_bytes(folder / "memory.stat", kind) or 0 for kind in kinds)
            yield int(limit) - max(int(used) - of_files, 0)


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory grew at its peak while `work` ran; 0 where that cannot be measured."""
    with contextlib.suppress(OSError):  # an earlier, higher peak then hides this one
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
    before = _field_bytes(_STATUS, "VmRSS") or 0
    work()
    after = _field_bytes(_STATUS, "VmHWM") or 0
    return max(after - before, 0)


def _field_bytes(path: Path, name: str) -> int | None:
    """What a file of one field a line has behind `name`, in bytes; None where it has no such field."""
    for line in text_of(path).splitlines():
        words = line.split()
        if words and words[0].rstrip(":") == name:
            return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return None
