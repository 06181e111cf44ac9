"""Who is served first: a registry of pure functions from a group to its sort key (lower is served earlier)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler_svc.sequence import SequenceGroup

Policy = Callable[[SequenceGroup], tuple[Any, ...]]


def fcfs(group: SequenceGroup) -> tuple[Any, ...]:
    """First come, first served. A group keeps its place when it is preempted or moved."""
    return (group.order,)


POLICIES: dict[str, Policy] = {"fcfs": fcfs}
