"""How much of this process's cores other processes use, as Linux counts it.

/proc/stat says what every core has done since the machine started, in ticks of mostly 10 ms, and a clock of the process
what part of that was its own. Processes of lower priority (`nice`) yield to this one and are not counted beside
one that has none; nor is what a hypervisor has taken: fewer threads would not bring that back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_COUNTED = (0, 2, 5, 6)  # of a line's numbers: user, system, irq, softirq
_NICE = 1  # among them: user, of processes of lower priority


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds, each since a moment of its own."""

    now: float
    all_processes: float  # of the cores that were asked about, together
    this_process: float


def read_core_times(cores: Collection[int], stat: Path = _STAT) -> CoreTimes | None:
    """None where the system does not say it for each of these cores."""
    counted = (*_COUNTED, _NICE) if os.nice(0) > 0 else _COUNTED
    ticks: dict[str, int] = {}
    try:
        for line in stat.read_text(encoding="ascii").splitlines():
            if line.startswith("cpu"):
                name, *numbers = line.split(maxsplit=8)
                ticks[name] = sum(int(numbers[place]) for place in counted)
        busy = sum(ticks[f"cpu{core}"] for core in cores)
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError):
        return None
    return CoreTimes(time.monotonic(), busy * tick_s, time.process_time())


def used_by_others(before: CoreTimes, after: CoreTimes) -> float:
    """How many cores, on average, other processes used between the two."""
    others = (after.all_processes - before.all_processes) - (after.this_process - before.this_process)
    return max(others, 0.0) / (after.now - before.now)
