"""Limits and weights of tenants in the engine: any thread has requests admitted, and the step loop begins them.

A request that is held stands in no queue. It gets its number when it arrives, and with it its place when its turn has
come. Without a file that says anything of tenants, nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.shared.access.tenant_limits import TenantTable
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.limits.tenant_account import Ask
from scheduler_svc.limits.tenant_ledger import TenantLedger

COUNT_S = 0.5  # between two counts of what running requests have generated


class TenantTurns:
    """Over one ledger.

    Args:
        table: what tenants may have and weigh; None: no file says.
        has_limits: False for a shard, which takes weights alone: its parent sees all requests.
        weights: of options; those of the file win.
        weigh: takes weights that count from now on; on the step loop.
        begin: has the step loop begin a request that was held; from any thread.
        clock: nanoseconds.
    """

    def __init__(
        self,
        table: Callable[[], TenantTable] | None,
        weigh: Callable[[Mapping[str, float]], None],
        begin: Callable[[SequenceGroup], None],
        clock: Callable[[], int],
        *,
        has_limits: bool = True,
        weights: Mapping[str, float],
    ) -> None:
        self._table, self._weigh, self._begin, self._clock = table, weigh, begin, clock
        self._weights = dict(weights)
        self._weighed: Mapping[str, float] = {}  # by the file, as it was last
        self._ledger = TenantLedger[SequenceGroup](table) if table is not None and has_limits else None
        self._num_resumed: dict[SequenceGroup, int] = {}  # tokens that they brought, where they brought any
        self.watch()

    @property
    def num_held(self) -> int:
        """Requests that wait for their tenant's turn."""
        return 0 if self._ledger is None else self._ledger.num_held

    def held(self) -> list[SequenceGroup]:
        """These requests, in no order."""
        return [] if self._ledger is None else self._ledger.held()

    def check(self, tenant: str, num_bytes: int) -> None:
        """Raises OverLimit where a request of so many bytes would be refused whatever else is in it."""
        if self._ledger is not None:
            self._ledger.check(tenant, num_bytes, self._clock() / 1e9)

    def admit(self, group: SequenceGroup) -> bool:
        """Whether it begins now; False: `begin` is called with it later. `ended` has to follow. Raises OverLimit,
        InvalidRequest."""
        if self._ledger is None:
            return True
        num_tokens = group.num_prompt_tokens + (0 if group.is_resumed else group.num_resumed_tokens)
        ask = Ask(group.tenant, num_tokens, group.best_of, group.num_bytes, group.is_resumed)
        begins = self._ledger.admit(group, ask, self._clock() / 1e9)
        if group.has_resumed_tokens:
            self._num_resumed[group] = _num_tokens(group)
        return begins

    def ended(self, group: SequenceGroup) -> None:
        """It lives no more; those whose turn has come begin."""
        if self._ledger is None:
            return
        self._charge(group)
        self._num_resumed.pop(group, None)
        for released in self._ledger.ended(group):
            self._begin(released)

    def watch(self) -> None:
        """On the step loop, whenever it turns: charges what was generated, and takes what the file says by now."""
        if self._table is None:
            return
        if self._ledger is not None:
            now_s = self._clock() / 1e9
            for group in self._ledger.to_be_counted(now_s, COUNT_S):
                self._charge(group)
            for group in self._ledger.look(now_s):
                self._begin(group)
        if (weights := self._table().weights) is not self._weighed:
            self._weighed = weights
            self._weigh({**self._weights, **weights})

    def _charge(self, group: SequenceGroup) -> None:
        assert self._ledger is not None
        num_generated = _num_tokens(group) - self._num_resumed.get(group, 0)
        self._ledger.charge(group, num_generated, self._clock() / 1e9)


def _num_tokens(group: SequenceGroup) -> int:
    return sum(sequence.num_tokens - group.num_prompt_tokens for sequence in group.sequences)
