"""Requests that had begun and lost their turn through no fault of their own: they may resume before all that wait.

A client's claim alone is worth nothing: tokens that nobody gave it let it queue as any new request. That a request had
begun is known from the worker that ran it, which names it to the next scheduler with its lease, or from the group
itself where its client's connection broke here. Each lost turn is given back once, to the tenant whose it was; a worker
knows of no tenants, so what it names is for whoever has the id.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

MAX_KNOWN = 65_536  # turns; those known longest are forgotten first


class AdmittedBefore:
    """Thread-safe. `most`: turns that are known at once. A tenant None stands for any."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._turns: OrderedDict[tuple[str | None, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._turns)

    def has(self, request_id: str, tenant: str) -> bool:
        """Whether `take` would give a turn."""
        return (tenant, request_id) in self._turns or (None, request_id) in self._turns

    def learn(self, request_ids: Iterable[str], tenant: str | None = None) -> None:
        """These had their turn."""
        with self._lock:
            for request_id in request_ids:
                turn = tenant, request_id
                self._turns[turn] = None
                self._turns.move_to_end(turn)
                if len(self._turns) > self._most:
                    self._turns.popitem(last=False)

    def take(self, request_id: str, tenant: str) -> bool:
        """Whether a request that says so had its turn: it gets it back, and has it no more."""
        with self._lock:
            return any(self._turns.pop((whose, request_id), self) is None for whose in (tenant, None))
