"""Who is served first: a registry of pure functions over groups. Knows neither queues nor clocks.

A policy splits what waits into lanes and orders each lane. Lanes take turns by the tokens that they were served
(`ServedTokens`); the lane None is not counted and comes before all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.core.sequences.sequence import SequenceGroup

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to order groups.

    Attributes:
        key: order within a lane and among the groups of a worker: the lowest is served first, the highest preempted
            first. Ends in `order`, so that no two groups are equal, and holds still while a group waits.
        lane: the lane that a group waits in.
        urgency: groups of a lower number are served before all of a higher one.
        overrules: whether the first group, which waits, may have the second, which runs, preempted for its sake.
        preempts: whether that is ever so.
        counts_tokens: whether the service order depends on `ServedTokens`, which somebody then has to charge.
    """

    key: Callable[[SequenceGroup], Key]
    lane: Callable[[SequenceGroup], str | None]
    urgency: Callable[[SequenceGroup], int]
    overrules: Callable[[SequenceGroup, SequenceGroup], bool]
    preempts: bool = False
    counts_tokens: bool = False


def _by_order(group: SequenceGroup) -> Key:
    return (group.order,)


def _by_priority(group: SequenceGroup) -> Key:
    return (group.priority, group.order)


def _all_alike(group: SequenceGroup) -> int:
    return 0


def _priority(group: SequenceGroup) -> int:
    return group.priority


def _one_lane(group: SequenceGroup) -> None:
    return None


def _lane_of_share(group: SequenceGroup) -> str | None:
    """Of a group that had begun and lost its worker or scheduler, none: a client is in the middle of its answer."""
    return group.share if group.first_scheduled_ns is None and not group.is_resumed else None


def _never(waiting: SequenceGroup, running: SequenceGroup) -> bool:
    return False


def _is_more_urgent(waiting: SequenceGroup, running: SequenceGroup) -> bool:
    return waiting.priority < running.priority


POLICIES: dict[str, Policy] = {
    # First come, first served. A group keeps its place when it is preempted or moved.
    "fcfs": Policy(key=_by_order, lane=_one_lane, urgency=_all_alike, overrules=_never),
    # Lower numbers first, and they take the place of higher ones that run. Starves higher numbers for as long as lower
    # ones keep coming: that is what it is for.
    "priority": Policy(key=_by_priority, lane=_one_lane, urgency=_priority, overrules=_is_more_urgent, preempts=True),
    # The tenant that was served the fewest tokens for its weight first; within a tenant first come, first served. Says
    # who begins and takes nothing away: a flood keeps the slots that it has until those requests end, and then gets its
    # share of them. To preempt for fairness' sake would compute twice, at the cost of both tenants.
    "fair": Policy(key=_by_order, lane=_lane_of_share, urgency=_all_alike, overrules=_never, counts_tokens=True),
}
