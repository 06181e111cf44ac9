"""Requests that were taken and have not ended, by id and tenant, and the bounds on how many of them may wait.

Thread-safe: callers add here before the step loop has seen their group, and the loop takes out. No operation but `all`
grows with the number of live requests by more than a logarithm.

A client that has read the end of a request may send the next one of the same id at once. So an id is free before the
end is handed out, a moment before its request has been taken out of every place that knows it, and out of here.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator

from scheduler_svc.core.queues.ordered_groups import Entry, OrderedGroups
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.engine.requests.admitted_before import AdmittedBefore
from scheduler_svc.engine.requests.tenant_turns import TenantTurns
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
        tenants: TenantTurns,
    ) -> None:
        self._waiting = waiting
        self._tenants = tenants
        self._admitted_before = admitted_before
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._lock = threading.Lock()
        self._entries: dict[SequenceGroup, Entry] = {}
        # By request id, then by tenant; no inner one is empty. Those whose id is free already are not here.
        self._by_id: dict[str, dict[str, SequenceGroup]] = {}
        self._ended_above: dict[SequenceGroup, set[Sequence]] = {}
        self._in_order = OrderedGroups()  # of admission
        self._numbers: Iterator[int] = itertools.count(1)
        self._num_by_model: Counter[str] = Counter()  # by fingerprint
        self._num_on_the_way = 0
        self._num_tokens_on_the_way = 0
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._entries)

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

    def add(self, group: SequenceGroup) -> bool:
        """Takes a request; whether it begins now, and `arrived` has to follow. Otherwise its tenant's limit holds it
        until its turn has come, if it lives that long: it takes no room from others.

        Raises:
            QueueFull: the waiting queue is at its bound, or (OverLimit) the tenant at a limit.
            InvalidRequest: the tenant may never run it.
            DuplicateRequest: its tenant has a live request of this id.
            NotReady: closed.
        """
        with self._lock:
            if self.is_closed:
                raise NotReady("this server is shutting down")
            if group.tenant in self._by_id.get(group.request_id, ()):
                raise DuplicateRequest(f"request {group.request_id!r} is live already")
            if not (group.is_resumed or group.num_moves):  # one that was taken by a shard is not refused by the next
                self._check_bounds(group.num_prompt_tokens + group.num_resumed_tokens)
            begins = self._tenants.admit(group)
            entry = (next(self._numbers),), group
            self._entries[group] = entry
            self._by_id.setdefault(group.request_id, {})[group.tenant] = group
            self._in_order.add(entry)
            self._num_by_model[group.model] += 1
            if begins:
                self._num_on_the_way += 1
                self._num_tokens_on_the_way += group.num_prompt_tokens
            self._free_ended_id(group)  # it is resumed with nothing left to do: its client may read that at once
            return begins

    def check_room(self, tenant: str, request_id: str, num_to_come: int, num_bytes: int = 0) -> None:
        """Raises QueueFull where the request would not be taken, however short, once `num_to_come` others have come.

        Not for an id that is live: `add` has another answer to it, or it is about to be replaced. Nor for one that had
        its turn.
        """
        if tenant not in self._by_id.get(request_id, ()) and not self._admitted_before.has(request_id, tenant):
            self._check_requests(num_to_come)
            self._tenants.check(tenant, num_bytes)

    def arrived(self, group: SequenceGroup) -> None:
        """The step loop has it."""
        with self._lock:
            self._num_on_the_way -= 1
            self._num_tokens_on_the_way -= group.num_prompt_tokens

    def free_ended_id(self, group: SequenceGroup) -> None:
        """The id may be used again, if all sequences of the group have ended, here or above. The group lives on."""
        with self._lock:
            self._free_ended_id(group)

    def end_above(self, sequence: Sequence) -> None:
        """The layer above has ended it, and the step loop will hear of that. Frees an id as `free_ended_id` does."""
        with self._lock:
            if sequence.group in self._entries:
                self._ended_above.setdefault(sequence.group, set()).add(sequence)
                self._free_ended_id(sequence.group)

    def free(self, group: SequenceGroup) -> None:
        """It lives no more, and its id may be used again. Does nothing for a group that was never added."""
        with self._lock:
            entry = self._entries.pop(group, None)
            if entry is None:
                return
            self._free_id(group)
            self._ended_above.pop(group, None)
            self._in_order.remove(entry)
            self._num_by_model[group.model] -= 1
            if not self._num_by_model[group.model]:
                del self._num_by_model[group.model]
        self._tenants.ended(group)

    def find(self, request_id: str, tenant: str | None = None) -> list[SequenceGroup]:
        """Those that hold this id, of one tenant or of all."""
        with self._lock:
            tenants = self._by_id.get(request_id, {})
            return [group for name, group in tenants.items() if tenant in (None, name)]

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
        """Whether a group was taken and not freed, though its id may be free."""
        return group in self._entries

    def all(self) -> list[SequenceGroup]:
        """In order of arrival; costs as much as there are."""
        with self._lock:
            return [group for _, group in self._in_order]

    def close(self) -> None:
        """Takes no more."""
        with self._lock:
            self.is_closed = True

    def _free_ended_id(self, group: SequenceGroup) -> None:
        if self._ended_above.get(group, set()).issuperset(group.unfinished()):
            self._free_id(group)

    def _free_id(self, group: SequenceGroup) -> None:
        tenants = self._by_id.get(group.request_id, {})
        if tenants.get(group.tenant) is group:
            del tenants[group.tenant]
            if not tenants:
                del self._by_id[group.request_id]

    def _check_bounds(self, num_prompt_tokens: int) -> None:
        self._check_requests()
        num_tokens, most = self.num_waiting_tokens + num_prompt_tokens, self._max_waiting_tokens
        if num_tokens > most:
            raise QueueFull(f"{num_tokens} prompt tokens would wait, at most {most} may", RETRY_AFTER_S)

    def _check_requests(self, num_to_come: int = 0) -> None:
        num_waiting, most = self.num_waiting + num_to_come, self._max_waiting_requests
        if num_waiting >= most:
            raise QueueFull(f"{num_waiting} requests wait, at most {most} may", RETRY_AFTER_S)
