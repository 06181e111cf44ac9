"""Limits of tenants over all requests of a scheduler: who is refused, and who waits for its tenant's turn.

A request is admitted or refused. An admitted one begins at once, or is held while its tenant has as many sequences
running as it may: so it stands before nobody else. Prompt tokens are charged when a request is admitted, cached or not:
what they cost would tell what others have sent. Generated ones are charged as they come and not reserved before, as
most requests name no `max_tokens`, and one of them would take a whole minute's tokens for itself.

No operation grows with the number of tenants or requests, but for `to_be_counted`, with running requests whose tokens
are limited, and for one `look` after the file has changed, with tenants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from octavo.shared.access.tenant_limits import UNLIMITED, TenantLimits, TenantTable
from scheduler_svc.limits.tenant_account import Ask, TenantAccount

MAX_IDLE = 1024  # tenants, before those that have nothing left to remember are forgotten

Key = TypeVar("Key", bound=Hashable)


class TenantLedger(Generic[Key]):
    """Thread-safe. Keys are the caller's names of requests, times seconds on a clock that rises.

    Args:
        table: what is in force; looked at with each request.
    """

    def __init__(self, table: Callable[[], TenantTable]) -> None:
        self.table = table
        self._lock = threading.Lock()
        self._accounts: dict[str, TenantAccount[Key]] = {}
        self._live: dict[Key, tuple[TenantAccount[Key], int]] = {}  # and generated tokens that were charged
        self._seen = table()
        self._counted: set[str] = set()  # tenants with a limit of tokens that have asked and may have something running
        self._counted_s = float("-inf")
        self._forget_at = MAX_IDLE

    @property
    def num_held(self) -> int:
        """Requests that wait for their tenant's turn. Grows with the number of tenants."""
        with self._lock:
            return sum(len(account.held) for account in self._accounts.values())

    def held(self) -> list[Key]:
        """These requests, in no order."""
        with self._lock:
            return [key for account in self._accounts.values() for key in account.held]

    def check(self, tenant: str, num_bytes: int, now_s: float) -> None:
        """Raises OverLimit where a request of so many bytes is refused whatever else is in it. Takes nothing."""
        table = self.table()
        if (limits := table.of(tenant)) is not UNLIMITED:
            with self._lock:
                account = self._account(tenant, limits, now_s)
                account.check(Ask(tenant, 1, 1, num_bytes), tenant in table.named, now_s)

    def admit(self, key: Key, ask: Ask, now_s: float) -> bool:
        """Whether the request begins now; otherwise it is held. `ended` has to follow.

        Raises OverLimit, and InvalidRequest for more sequences than the tenant may ever run.
        """
        table = self.table()
        if (limits := table.of(ask.tenant)) is UNLIMITED and ask.tenant not in self._accounts:
            return True
        with self._lock:
            account = self._account(ask.tenant, limits, now_s)
            account.check(ask, ask.tenant in table.named, now_s)
            self._live[key] = account, 0
            return account.add(key, ask, now_s)

    def cancel(self, key: Key, now_s: float) -> list[Key]:
        """It was refused elsewhere after it was admitted here: as if it had never come. Returns as `ended`."""
        with self._lock:
            if key in self._live:
                self._live[key][0].give_back(key, now_s)
            return self._end(key)

    def ended(self, key: Key) -> list[Key]:
        """It lives no more, whether it began or was held. Returns held ones that begin now, in order.

        Does nothing for one that is not here.
        """
        if key not in self._live:
            return []
        with self._lock:
            return self._end(key)

    def is_held(self, key: Key) -> bool:
        """Whether it was admitted and has not begun."""
        with self._lock:
            return key in self._live and key in self._live[key][0].held

    # ---- generated tokens -------------------------------------------------------------------------------------------

    def to_be_counted(self, now_s: float, pause_s: float) -> list[Key]:
        """Running requests whose generated tokens are to be charged, those of tenants that have a limit of tokens; none
        before `pause_s` have passed since the last time."""
        if not self._counted or now_s - self._counted_s < pause_s:
            return []
        with self._lock:
            self._counted_s = now_s
            self._counted = {name for name in self._counted if self._accounts[name].running}
            return [key for name in self._counted for key in self._accounts[name].running]

    def charge(self, key: Key, num_generated: int, now_s: float) -> None:
        """How many tokens a live request has generated by now, all told."""
        if key not in self._live:
            return
        with self._lock:
            account, num_charged = self._live.get(key, (None, 0))
            if account is not None and num_generated > num_charged:
                if account.tokens is not None:
                    account.tokens.take(num_generated - num_charged, now_s)
                self._live[key] = account, num_generated

    # ---- the file ---------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> list[Key]:
        """To be called now and then: held requests that begin now because limits have changed."""
        if (table := self.table()) is self._seen:
            return []
        with self._lock:
            self._seen = table
            begun: list[Key] = []
            for tenant, account in self._accounts.items():
                account.take_limits(table.of(tenant), now_s)
                begun += account.release()
            return begun

    def check_integrity(self) -> None:
        """Raises AssertionError where accounts and requests contradict one another. Reads everything."""
        with self._lock:
            known = [key for account in self._accounts.values() for key in (*account.running, *account.held)]
            assert len(known) == len(self._live) and set(known) == self._live.keys(), "a request is in no account"
            for account in self._accounts.values():
                account.check_integrity()

    def _account(self, tenant: str, limits: TenantLimits, now_s: float) -> TenantAccount[Key]:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._forget_at:
                self._forget_idle(now_s)
            account = self._accounts[tenant] = TenantAccount()
        if account.limits is not limits:
            account.take_limits(limits, now_s)
        if account.tokens is not None:
            self._counted.add(tenant)
        return account

    def _end(self, key: Key) -> list[Key]:
        if key not in self._live:
            return []
        account, _ = self._live.pop(key)
        account.remove(key)
        return account.release()

    def _forget_idle(self, now_s: float) -> None:
        self._accounts = {name: each for name, each in self._accounts.items() if not each.is_forgettable(now_s)}
        self._counted &= self._accounts.keys()
        self._forget_at = max(MAX_IDLE, 2 * len(self._accounts))
