"""Which tenants have groups waiting in any of the queues that share their counters.

A tenant that comes back starts level with the others.
"""

from __future__ import annotations

import heapq

from scheduler_svc.core.queues.served_tokens import ServedTokens


class WaitingTenants:
    """Counts the lanes of each tenant over all queues. No operation grows with the tenants by more than a logarithm."""

    def __init__(self, served: ServedTokens) -> None:
        self.served = served
        self._num_lanes: dict[str, int] = {}  # none of them 0
        self._levels: list[tuple[float, str]] = []  # a heap; levels only rise, so nobody stands before his entry
        self._last: str | None = None  # who waited last, while nobody does

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._num_lanes

    def came(self, tenant: str) -> None:
        """A lane of the tenant was opened. One that waited nowhere starts level with the least served of those that do.

        Where nobody does, with the one that did last.
        """
        if tenant not in self._num_lanes:
            least = self._least_served()
            leader = self._last if least is None else least
            if leader is not None:
                self.served.lift(tenant, self.served.level(leader), self._num_lanes.keys())
            self._num_lanes[tenant] = 0
            heapq.heappush(self._levels, (self.served.level(tenant), tenant))
            if len(self._levels) > 2 * len(self._num_lanes) + 64:
                self._levels = [(self.served.level(name), name) for name in self._num_lanes]
                heapq.heapify(self._levels)
        self._num_lanes[tenant] += 1

    def left(self, tenant: str) -> None:
        """A lane of the tenant became empty."""
        self._num_lanes[tenant] -= 1
        if not self._num_lanes[tenant]:
            del self._num_lanes[tenant]
            self._last = tenant

    def _least_served(self) -> str | None:
        while self._levels:
            level, tenant = self._levels[0]
            if tenant not in self._num_lanes:
                heapq.heappop(self._levels)
            elif level != self.served.level(tenant):
                heapq.heapreplace(self._levels, (self.served.level(tenant), tenant))
            else:
                return tenant
        return None
