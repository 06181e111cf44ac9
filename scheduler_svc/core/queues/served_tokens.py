"""How much service each tenant has had: the counters that fair turns are taken by.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Who serves a tenant
charges it: the tokens of prompts and of resumed outputs that are to be computed (cache hits are free) when its group is
admitted, so that the next admission of the same step sees them, and generated tokens as they come. Tokens computed once
more after a preemption or a lost worker are not the tenant's to pay. Counters only rise; two tenants that both keep
groups waiting stay within what one admission and the running groups amount to, whatever a third one does.

Tenants are forgotten, and forgetting must save none of them anything: who is not remembered stands at the floor, which
is at least where each of them stood. The floor follows the least served of those that wait; where too many stand above
it, those of them that were served least are forgotten, and it rises to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MIN_REMEMBERED = 1024  # tenants below which forgetting is not worth a look
MAX_REMEMBERED = 16_384  # that do not wait: about 2 MB


class ServedTokens:
    """Tokens served by tenant, divided by the tenant's weight.

    Args:
        weights: a tenant of weight 3 is due three times the tokens of one of weight 1, which is everybody's default.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weigh(weights or {})
        self._levels: dict[str, float] = {}
        self._floor = 0.0  # where a tenant that is not in `_levels` stands
        self._look_at = MIN_REMEMBERED

    def weigh(self, weights: Mapping[str, float]) -> None:
        """These weights count from now on; what was served before stays as it was counted. Raises ValueError."""
        for tenant, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of tenant {tenant!r} is {weight}, a positive number is accepted")
        self._weights = dict(weights)

    def share_of(self, tenant: str, *, is_known: bool) -> str:
        """Under which name a tenant is counted. `is_known`: the server has the name from others than its clients.

        Else it may be made up, and who takes a new name for every request would come first with each. So all names but
        those that were given a weight share one.
        """
        return tenant if is_known or tenant in self._weights else ""

    def level(self, tenant: str) -> float:
        """Weighted tokens that the tenant has been served. Never falls."""
        return self._levels.get(tenant, self._floor)

    def cost(self, tenant: str, num_tokens: int) -> float:
        """By how much so many tokens raise the tenant's level."""
        return num_tokens / self._weights.get(tenant, 1.0)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens that the tenant was served."""
        assert num_tokens >= 0, "served tokens are not given back"
        self._levels[tenant] = self.level(tenant) + self.cost(tenant, num_tokens)

    def lift(self, tenant: str, floor: float, waiting: Collection[str] = ()) -> None:
        """Raises a tenant that comes back to the least of those that wait, so that idling has saved it nothing.

        Nobody that waits is below `floor`, which is why whoever stands at it need not be remembered. `waiting`: who has
        groups waiting, and is not to be raised for want of memory.
        """
        self._floor = max(self._floor, floor)
        if self.level(tenant) < self._floor:
            self._levels[tenant] = self._floor
        if len(self._levels) > self._look_at:
            self._forget(waiting)

    def _forget(self, waiting: Collection[str]) -> None:
        """All that stand at the floor; and where too many are left, the lower half of those that do not wait."""
        levels = self._levels.items()
        self._levels = {name: level for name, level in levels if level > self._floor or name in waiting}
        idle = [(level, name) for name, level in self._levels.items() if name not in waiting]
        if len(idle) > MAX_REMEMBERED:
            # First those that wait are noted, for they stay where they are when the floor rises.
            self._levels |= {name: self.level(name) for name in waiting}
            idle.sort()
            forgotten = idle[: len(idle) // 2]
            for _, name in forgotten:
                del self._levels[name]
            self._floor = forgotten[-1][0]
        self._look_at = max(MIN_REMEMBERED, 2 * len(self._levels))

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._levels)
