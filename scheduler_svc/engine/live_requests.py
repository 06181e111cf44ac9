"""Requests that were taken and have not ended, by id and tenant, and the bound on how many of them may wait.

Thread-safe: callers add here before the step loop has seen their group, and the loop takes out. No operation but `all`
grows with the number of live requests by more than a logarithm.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator

from scheduler_svc.core.ordered_groups import Entry, OrderedGroups
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.engine.admitted_before import AdmittedBefore
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull
from scheduler_svc.routing.bound_queues import BoundQueues

RETRY_AFTER_S = 1.0


class LiveRequests:
    """Counts what waits in `waiting` together with what is on its way there."""

    def __init__(
        self,
        waiting: BoundQueues,
        admitted_before: AdmittedBefore,
        max_waiting_requests: int,
        max_waiting_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._admitted_before = admitted_before
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._lock = threading.Lock()
        self._by_id: dict[str, dict[str, Entry]] = {}  # by request id, then by tenant; no inner one is empty
        self._in_order = OrderedGroups()  # of admission
        self._numbers: Iterator[int] = itertools.count(1)
        self._count = 0
        self._num_by_model: Counter[str] = Counter()  # by fingerprint
        self._num_on_the_way = 0
        self._num_tokens_on_the_way = 0
        self.is_closed = False

    def __len__(self) -> int:
        return self._count

    def number_by(self, numbers: Iterator[int]) -> None:
        """Numbers of requests that are taken from now on; they have to rise."""
        self._numbers = numbers

    @property
    def num_waiting(self) -> int:
        """Groups that no worker has begun, those included that the step loop has not seen."""
        return len(self._waiting) + self._num_on_the_way

    @property
    def is_full(self) -> bool:
        """Whether not even the shortest request would be taken."""
        return self.num_waiting >= self._max_waiting_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that these still have to compute."""
        return self._waiting.num_tokens + self._num_tokens_on_the_way

    def add(self, group: SequenceGroup) -> None:
        """Takes a request; `arrived` has to follow.

        Raises:
            QueueFull: the waiting queue is at its bound.
            DuplicateRequest: its tenant has a live request of this id.
            NotReady: closed.
        """
        with self._lock:
            if self.is_closed:
                raise NotReady("this server is shutting down")
            if group.tenant in self._by_id.get(group.request_id, ()):
                raise DuplicateRequest(f"request {group.request_id!r} is live already")
            if not group.is_resumed:
                self._check_bounds(group.num_prompt_tokens)
            entry = (next(self._numbers),), group
            self._by_id.setdefault(group.request_id, {})[group.tenant] = entry
            self._in_order.add(entry)
            self._count += 1
            self._num_by_model[group.model] += 1
            self._num_on_the_way += 1
            self._num_tokens_on_the_way += group.num_prompt_tokens

    def check_room(self, tenant: str, request_id: str, num_to_come: int) -> None:
        """Raises QueueFull where the request would not be taken, however short, once `num_to_come` others have come.

        Not for an id that is live: `add` has another answer to it, or it is about to be replaced. Nor for one that had
        its turn.
        """
        if tenant not in self._by_id.get(request_id, ()) and request_id not in self._admitted_before:
            self._check_requests(num_to_come)

    def arrived(self, group: SequenceGroup) -> None:
        """The step loop has it."""
        with self._lock:
            self._num_on_the_way -= 1
            self._num_tokens_on_the_way -= group.num_prompt_tokens

    def free(self, group: SequenceGroup) -> None:
        """Its id may be used again. Does nothing for a group that was never added."""
        with self._lock:
            tenants = self._by_id.get(group.request_id, {})
            entry = tenants.get(group.tenant)
            if entry is None or entry[1] is not group:
                return
            del tenants[group.tenant]
            if not tenants:
                del self._by_id[group.request_id]
            self._in_order.remove(entry)
            self._count -= 1
            self._num_by_model[group.model] -= 1
            if not self._num_by_model[group.model]:
                del self._num_by_model[group.model]

    def find(self, request_id: str, tenant: str | None = None) -> list[SequenceGroup]:
        """Those of this id, of one tenant or of all."""
        with self._lock:
            tenants = self._by_id.get(request_id, {})
            return [group for name, (_, group) in tenants.items() if tenant in (None, name)]

    def page(self, after: int, limit: int) -> list[tuple[int, SequenceGroup]]:
        """At most `limit` in order of admission, with their numbers, which rise: those of higher ones than `after`."""
        with self._lock:
            entries = itertools.islice(self._in_order.after((after,)), limit)
            return [(key[0], group) for key, group in entries]

    def num_by_model(self) -> dict[str, int]:
        """How many there are, by the fingerprint of their model."""
        with self._lock:
            return dict(self._num_by_model)

    def has(self, group: SequenceGroup) -> bool:
        """Whether a group was taken and has not ended."""
        return any(live is group for live in self.find(group.request_id, group.tenant))

    def all(self) -> list[SequenceGroup]:
        """In order of arrival; costs as much as there are."""
        with self._lock:
            return [group for _, group in self._in_order]

    def close(self) -> None:
        """Takes no more."""
        with self._lock:
            self.is_closed = True

    def _check_bounds(self, num_prompt_tokens: int) -> None:
        self._check_requests()
        num_tokens, most = self.num_waiting_tokens + num_prompt_tokens, self._max_waiting_tokens
        if num_tokens > most:
            raise QueueFull(f"{num_tokens} prompt tokens would wait, at most {most} may", RETRY_AFTER_S)

    def _check_requests(self, num_to_come: int = 0) -> None:
        num_waiting, most = self.num_waiting + num_to_come, self._max_waiting_requests
        if num_waiting >= most:
            raise QueueFull(f"{num_waiting} requests wait, at most {most} may", RETRY_AFTER_S)
