"""The one queue of groups that no worker holds: bounded, in policy order. Knows neither clock nor threads."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from scheduler_svc.policy import Policy
from scheduler_svc.sequence import SequenceGroup


class WaitingQueue:
    """A heap by policy key. Removal marks, and the mark is swept when it reaches the top."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, SequenceGroup]] = []
        self._members: set[SequenceGroup] = set()
        self._arrivals = itertools.count(1)
        self._entries = itertools.count()
        self.num_tokens = 0  # that the waiting groups still have to compute

    def __len__(self) -> int:
        return len(self._members)

    def push(self, group: SequenceGroup) -> None:
        """Adds a new group at its place, or one that a worker gave back at the place that it had."""
        if not group.order:
            group.order = next(self._arrivals)
        self._members.add(group)
        self.num_tokens += _num_tokens(group)
        heapq.heappush(self._heap, (self._policy(group), next(self._entries), group))

    def peek(self) -> SequenceGroup | None:
        while self._heap and self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceGroup:
        group = self.peek()
        assert group is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._forget(group)
        return group

    def remove(self, group: SequenceGroup) -> bool:
        """Takes a group out; False when it was not waiting here."""
        if group not in self._members:
            return False
        self._forget(group)
        return True

    def _forget(self, group: SequenceGroup) -> None:
        self._members.remove(group)
        self.num_tokens -= _num_tokens(group)
        if len(self._heap) > 2 * len(self._members) + 64:  # behind a head that stays, marked entries would pile up
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)


def _num_tokens(group: SequenceGroup) -> int:
    return sum(sequence.num_tokens for sequence in group.sequences)
