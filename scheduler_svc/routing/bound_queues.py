"""Everything that waits: a queue for each worker, and one for those that no worker can take now.

All are in policy order and count arrivals and tenants as one. Only the step loop's thread changes them; `len` and
`num_tokens` may be read from any other.
"""

from __future__ import annotations

from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup


class BoundQueues:
    """Groups in queues, each in one of them.

    Attributes:
        unbound: those that wait for a worker that can take them.
        num_tokens: that the waiting groups still have to compute.
    """

    def __init__(self, policy: Policy, served: ServedTokens | None = None) -> None:
        self.unbound = WaitingQueue(policy, served)
        self.num_tokens = 0
        self._queue_of: dict[SequenceGroup, WaitingQueue] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._queue_of

    @property
    def num_bound(self) -> int:
        """Groups that wait for a worker that was chosen for them."""
        return len(self._queue_of) - len(self.unbound)

    def new_queue(self) -> WaitingQueue:
        """For one worker."""
        return WaitingQueue(self.unbound.policy, beside=self.unbound)

    def number(self, group: SequenceGroup) -> None:
        """Gives a new group that waits nowhere yet the place that it has by its arrival."""
        self.unbound.number(group)

    def push(self, group: SequenceGroup, queue: WaitingQueue) -> None:
        """Adds a group, or moves one that waits elsewhere: at its place in that queue."""
        former = self._queue_of.get(group)
        if former is queue:
            return
        before = queue.num_tokens
        queue.push(group)
        self._queue_of[group] = queue
        more = queue.num_tokens - before
        if former is not None:  # only now, or its tenant would have nothing waiting for a moment
            more -= _removed(group, former)
        self.num_tokens += more

    def remove(self, group: SequenceGroup) -> bool:
        """Takes a group out, wherever it stands; False when it was not waiting."""
        queue = self._queue_of.pop(group, None)
        if queue is None:
            return False
        self.num_tokens -= _removed(group, queue)
        return True

    def all(self) -> list[SequenceGroup]:
        """Every group, in no order."""
        return list(self._queue_of)

    def check_integrity(self) -> None:
        """Raises AssertionError when queues and counts contradict one another. Reads every group."""
        queues = {id(queue): queue for queue in (self.unbound, *self._queue_of.values())}
        for queue in queues.values():
            queue.check_integrity()
            assert all(self._queue_of[group] is queue for group in queue.all()), "a group stands in two queues"
        assert sum(len(queue) for queue in queues.values()) == len(self._queue_of), "a group stands in no queue"
        assert self.num_tokens == sum(queue.num_tokens for queue in queues.values()), "tokens are miscounted"


def _removed(group: SequenceGroup, queue: WaitingQueue) -> int:
    """Takes a group out; the tokens that the queue counted of it, of which some may have ended since."""
    before = queue.num_tokens
    queue.remove(group)
    return before - queue.num_tokens
