"""Requests that had begun and lost their turn through no fault of their own: they may resume before all that wait.

A client's claim alone is worth nothing: tokens that nobody gave it let it queue as any new request. That a request had
begun is known from the worker that ran it, which names it to the next scheduler with its lease, or from the group
itself where its client's connection broke here. Each lost turn is given back once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

MAX_KNOWN = 65_536  # ids; those known longest are forgotten first


class AdmittedBefore:
    """Thread-safe. `most`: ids that are known at once."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def learn(self, request_ids: Iterable[str]) -> None:
        """These had their turn."""
        with self._lock:
            for request_id in request_ids:
                self._ids[request_id] = None
                self._ids.move_to_end(request_id)
                if len(self._ids) > self._most:
                    self._ids.popitem(last=False)

    def take(self, request_id: str) -> bool:
        """Whether a request that says so had its turn: it gets it back, and has it no more."""
        with self._lock:
            return self._ids.pop(request_id, self) is None
