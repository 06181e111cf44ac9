"""The addresses of all workers that a scheduler is to hold: those that were named, and those behind DNS names."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import structlog

from scheduler_svc.workers.worker_pool import DNS_PREFIX, resolve

log = structlog.get_logger()


class WorkerNames:
    """Attributes:
    known: addresses, those that were named first, then in the order in which they appeared; at most `most`.
    """

    def __init__(self, given: Iterable[str], most: int) -> None:
        given = list(given)
        self._names = [address.removeprefix(DNS_PREFIX) for address in given if address.startswith(DNS_PREFIX)]
        self._fixed = [address for address in given if not address.startswith(DNS_PREFIX)]
        self._found: list[str] = []
        self._most = most

    @property
    def known(self) -> list[str]:
        """In that order; what DNS said last counts."""
        return list(dict.fromkeys([*self._fixed, *self._found]))[: self._most]

    async def look_up(self, served: Collection[str]) -> None:
        """Asks for the names anew. An address that a name has no more is known for as long as it is `served`."""
        if not self._names:
            return
        answers = await asyncio.gather(*(asyncio.to_thread(resolve, name) for name in self._names))
        found = {address for answer in answers for address in answer}
        for address in found - set(self._found):
            log.info("worker address appeared", worker=address)
        kept = [address for address in self._found if address in found or address in served]
        for address in set(self._found) - set(kept):
            log.info("worker address is gone", worker=address)
        self._found = list(dict.fromkeys([*kept, *sorted(found)]))
