"""How many workers this scheduler holds where others hold the rest: its share first, more only while nobody wants them.

Schedulers never talk to one another. A worker knows who asks for its lease while another has it, and tells the holder:

    below its share     asks for every worker, also those that are held
    at its share        takes one that nobody has had for a while (a scheduler is gone)
    above its share     gives one back when told that it is wanted; its requests move to the others

Standby is a share of none. What it took it gives back when the other is there again, its last worker by handing over:
it lets requests finish or their clients go on elsewhere, and stands by anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protos import worker_pb2

MAX_FREE = 4096  # workers noted; one that is started again is another one, and its former lives are never seen again


class WorkerQuota:
    """Belongs to whoever counts the workers; not thread-safe.

    Args:
        share: workers to hold while others want theirs; None: as many as there are, and none is given back.
        takeover_after_s: how long a worker beyond the share has to be seen without a lease before it is taken.
    """

    def __init__(
        self, share: int | None, takeover_after_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._takeover_after_s = takeover_after_s
        self._clock = clock
        self._free_since_s: dict[str, float] = {}  # by instance: seen without a lease, and with one never since

    def refusal(self, info: worker_pb2.WorkerInfo, num_held: int) -> str:
        """Why this worker is not to be taken now; empty: it may be."""
        if self._share is None:
            return ""
        if info.lifecycle == worker_pb2.WORKER_LIFECYCLE_LEASED:
            self._free_since_s.pop(info.instance_id, None)
        else:
            self._free_since_s.setdefault(info.instance_id, self._clock())
            if len(self._free_since_s) > MAX_FREE:
                del self._free_since_s[next(iter(self._free_since_s))]
        if num_held < self._share:
            return ""
        free_since_s = self._free_since_s.get(info.instance_id)
        if free_since_s is None:
            return f"another scheduler has it, and this one its share of {self._share} (--worker-quota)"
        if self._clock() - free_since_s < self._takeover_after_s:
            return f"this scheduler has its share of {self._share}; it is taken if nobody has it before long"
        return ""

    def has_joined(self, info: worker_pb2.WorkerInfo) -> None:
        """It is this scheduler's: when it is given back, others have the first go."""
        self._free_since_s.pop(info.instance_id, None)

    def asks(self, num_held: int) -> bool:
        """Whether whoever holds a worker is to be told that it is wanted; `num_held`: with that one."""
        return self._share is not None and num_held <= self._share

    def gives_back(self, num_held: int) -> bool:
        """Whether one of so many is given to whoever wants it."""
        return self._share is not None and num_held > self._share
