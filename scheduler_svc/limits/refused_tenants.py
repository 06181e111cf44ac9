"""Tenants that a limit has refused, as a frontend knows it: it asks whether that is still so before it tokenises."""

from __future__ import annotations

import time

from scheduler_svc.limits.over_limit import OverLimit

MAX_TENANTS = 1024  # that are remembered


class RefusedTenants:
    """Whom a limit refuses still, if nothing has changed since. For one thread."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def note(self, refusal: OverLimit) -> None:
        """Its tenant is one, until it makes sense to try again."""
        if len(self._until_s) >= MAX_TENANTS:
            self._until_s.clear()  # they are refused all the same, later
        self._until_s[refusal.tenant] = time.monotonic() + refusal.retry_after_s

    def __contains__(self, tenant: str) -> bool:
        return self._until_s.get(tenant, 0.0) > time.monotonic()
