"""How long clients wait after a fault: from the moment it strikes to the first token that comes after the pause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.chaos.workload import Received

Row = dict[str, Any]


@dataclass(frozen=True)
class Recovery:
    """One fault: `waits_s` of the requests that the worker held and that streamed on elsewhere."""

    fault: str
    moment: str
    waits_s: list[float]


RECOVERIES: list[Recovery] = []
"""Of the tests that have run in this process."""


def wait_s(received: Received, struck_s: float) -> float | None:
    """None where no token came after the fault. What was on its way already ends no pause."""
    times = [struck_s, *(time_s for time_s in received.token_times_s if time_s > struck_s)]
    if len(times) == 1:
        return None
    gaps = np.diff(times)
    return times[int(np.argmax(gaps)) + 1] - struck_s


def summary(recoveries: list[Recovery]) -> list[Row]:
    """A row for each fault, over all its moments, then one for each of both."""
    faults = list(dict.fromkeys(one.fault for one in recoveries))
    moments = list(dict.fromkeys(one.moment for one in recoveries))
    rows = []
    for fault in faults:
        for moment in ("any", *moments):
            those = [one for one in recoveries if one.fault == fault and moment in ("any", one.moment)]
            waits = [wait for one in those for wait in one.waits_s]
            if waits:
                rows.append(
                    {
                        "fault": fault,
                        "moment": moment,
                        "runs": len(those),
                        "requests_moved": len(waits),
                        "p50_s": round(float(np.median(waits)), 3),
                        "max_s": round(max(waits), 3),
                    }
                )
    return rows
