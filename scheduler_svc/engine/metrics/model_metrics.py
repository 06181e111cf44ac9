"""The metrics of every model of a scheduler, by the name that requests give; revisions of one name count together.

As `Metrics`, the step loop's thread writes, and others may read at any time.
"""

from __future__ import annotations

from collections import Counter

from octavo.shared.access.tenant_limits import BYTES, REQUESTS, TOKENS, WAITING
from scheduler_svc.engine.metrics.metrics import Metrics
from scheduler_svc.errors import DuplicateRequest, InvalidRequest, NotReady, QueueFull, RequestRefused, UnknownName
from scheduler_svc.limits.over_limit import OTHERS as OTHER_TENANTS
from scheduler_svc.limits.over_limit import OverLimit

MAX_NAMES = 64  # that are told apart: they come from workers, and what was counted is never forgotten
OTHERS = "others"
_REFUSING = (REQUESTS, TOKENS, WAITING, BYTES)  # limits of tenants; the other one has requests wait
_REJECTIONS: dict[type[RequestRefused], str] = {
    QueueFull: "queue_full",
    OverLimit: "tenant_limit",
    NotReady: "not_ready",
    DuplicateRequest: "duplicate",
    InvalidRequest: "invalid",
    UnknownName: "unknown_name",
}


class ModelMetrics:
    """Models are named before anything of theirs is counted; what is of none has the name "".

    They are named for good: the pool forgets a model whose requests still wait for a worker, and end later.

    Attributes:
        num_over_limit: requests refused by a limit of their tenant, by tenant and limit.
        num_rejected: requests that were not admitted, by reason: most before it was known which model they are for.
    """

    def __init__(self, counts_prefixes: bool) -> None:
        self._counts_prefixes = counts_prefixes
        self._by_name: dict[str, Metrics] = {"": Metrics(counts_prefixes)}
        self._names: dict[str, str] = {}  # by fingerprint; as few as there have been revisions
        self.num_over_limit: Counter[tuple[str, str]] = Counter({(OTHER_TENANTS, limit): 0 for limit in _REFUSING})
        self.num_rejected: Counter[str] = Counter({reason: 0 for reason in (*_REJECTIONS.values(), "unsupported")})

    def introduce(self, fingerprint: str, name: str) -> None:
        """A model's name, before anything of it is counted; after MAX_NAMES new names count as one."""
        if name not in self._by_name and len(self._by_name) > MAX_NAMES:
            name = OTHERS
        self._by_name.setdefault(name, Metrics(self._counts_prefixes))
        self._names[fingerprint] = name

    def name_of(self, fingerprint: str) -> str:
        """Empty for a model that was never introduced."""
        return self._names.get(fingerprint, "")

    def of(self, fingerprint: str) -> Metrics:
        """Those of the model's name, to be counted into."""
        return self._by_name[self._names.get(fingerprint, "")]

    def by_name(self) -> dict[str, Metrics]:
        """That of no model only while there is no other, or once it has counted something."""
        found = dict(self._by_name)
        if len(found) > 1 and not found[""].has_counted():
            del found[""]
        return found

    def total(self) -> Metrics:
        """Of all models together, as they are now."""
        total = Metrics(self._counts_prefixes)
        for metrics in list(self._by_name.values()):
            total.add(metrics)
        return total

    def rejected(self, refusal: RequestRefused) -> None:
        """A request that was not admitted, by the kind of its refusal."""
        self.num_rejected[_REJECTIONS.get(type(refusal), "unsupported")] += 1
        if isinstance(refusal, OverLimit):
            self.num_over_limit[refusal.label, refusal.limit] += 1
