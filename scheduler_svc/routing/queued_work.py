"""How much waits at each worker, and how much of that is ahead of one group: sums, so no queue is read."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.routing.routing_cost import Ahead

MAX_URGENCIES = 32  # told apart; of more, one that comes is counted with the next lower one
Key = TypeVar("Key", int, str)
Work = npt.NDArray[np.float64]  # [2, workers]: tokens that are not cached there, slots


@dataclass(slots=True)
class _Share:
    """The work of one urgency or one tenant, of so many groups."""

    work: Work
    num_groups: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was counted of a group, to be taken back alike."""

    number: int
    num_tokens: float
    num_slots: int
    urgency: int
    lane: str | None


@dataclass(slots=True)
class QueuedWork:
    """Columns by the numbers of workers. `grow` makes room for more of them."""

    policy: Policy
    num_workers: int
    num_groups: npt.NDArray[np.int64] = field(init=False)  # that wait at each worker
    _all: Work = field(init=False)
    _num_lanes: npt.NDArray[np.int64] = field(init=False)
    _by_urgency: dict[int, _Share] = field(default_factory=dict)
    _by_lane: dict[str, _Share] = field(default_factory=dict)
    _urgencies: list[int] = field(default_factory=list)  # in order

    def __post_init__(self) -> None:
        self.num_groups = np.zeros(self.num_workers, np.int64)
        self._num_lanes = np.zeros(self.num_workers, np.int64)
        self._all = np.zeros((2, self.num_workers))

    def grow(self, num_workers: int) -> None:
        """Columns for workers up to this number, with nothing waiting at the new ones."""
        more = num_workers - self.num_workers
        self.num_workers = num_workers
        self.num_groups, self._num_lanes = np.pad(self.num_groups, (0, more)), np.pad(self._num_lanes, (0, more))
        self._all = np.pad(self._all, ((0, 0), (0, more)))
        for share in (*self._by_urgency.values(), *self._by_lane.values()):
            share.work = np.pad(share.work, ((0, 0), (0, more)))

    def add(self, group: SequenceGroup, number: int, num_tokens: float) -> Reservation:
        """The group waits at the worker of that number, where so many of its tokens are not cached."""
        made = Reservation(number, num_tokens, group.num_slots, self._urgency(group), self.policy.lane(group))
        self._all[0, number] += num_tokens
        self._all[1, number] += made.num_slots
        self.num_groups[number] += 1
        if made.lane is None:
            _add(self._by_urgency, made.urgency, made, self.num_workers)
            if len(self._urgencies) < len(self._by_urgency):
                bisect.insort(self._urgencies, made.urgency)
        else:
            share = _add(self._by_lane, made.lane, made, self.num_workers)
            self._num_lanes[number] += share.work[1, number] == made.num_slots
        return made

    def remove(self, made: Reservation) -> None:
        """Takes back what `add` counted for a group that has left a queue."""
        number = made.number
        self._all[0, number] -= made.num_tokens
        self._all[1, number] -= made.num_slots
        self.num_groups[number] -= 1
        if not self.num_groups[number]:
            self._all[:, number] = 0.0  # what rounding has left
        if made.lane is not None:
            share = _remove(self._by_lane, made.lane, made)
            self._num_lanes[number] -= share.work[1, number] <= 0
        elif not _remove(self._by_urgency, made.urgency, made).num_groups:
            self._urgencies.remove(made.urgency)

    def ahead(self, group: SequenceGroup) -> Ahead:
        """What stands before a group that comes now, at each worker.

        A group that comes back stands at the place that it had, before all later ones of its urgency. Where lanes take
        turns, each of the others is served about as much as the group's own before it.
        """
        has_begun = group.first_scheduled_ns is not None
        lane, urgency = self.policy.lane(group), self._urgency(group)
        is_last = not self._by_lane and (not self._urgencies or self._urgencies[-1] <= urgency)
        if lane is None and is_last and not has_begun:
            return Ahead(self._all[0], self._all[1])
        work = np.zeros((2, self.num_workers))
        for other in self._urgencies:
            if other < urgency or (other == urgency and not (has_begun and lane is None)):
                work += self._by_urgency[other].work
        if lane is not None and (own := self._by_lane.get(lane)) is not None:
            work = np.minimum(work + own.work * np.maximum(self._num_lanes, 1), self._all)
        return Ahead(work[0], work[1])

    def all(self) -> Ahead:
        """Everything that waits, by worker: as if one came last."""
        return Ahead(self._all[0], self._all[1])

    def _urgency(self, group: SequenceGroup) -> int:
        urgency = self.policy.urgency(group)
        if urgency in self._by_urgency or len(self._urgencies) < MAX_URGENCIES:
            return urgency
        return self._urgencies[max(0, bisect.bisect(self._urgencies, urgency) - 1)]


def _add(shares: dict[Key, _Share], key: Key, made: Reservation, num_workers: int) -> _Share:
    share = shares.get(key)
    if share is None:
        share = shares[key] = _Share(np.zeros((2, num_workers)))
    share.num_groups += 1
    share.work[0, made.number] += made.num_tokens
    share.work[1, made.number] += made.num_slots
    return share


def _remove(shares: dict[Key, _Share], key: Key, made: Reservation) -> _Share:
    share = shares[key]
    share.num_groups -= 1
    share.work[0, made.number] -= made.num_tokens
    share.work[1, made.number] -= made.num_slots
    if not share.num_groups:
        del shares[key]
    return share
