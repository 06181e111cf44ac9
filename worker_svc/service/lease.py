"""Which scheduler may send steps: at most one at a time, as long as its connection lives and it is not silent.

    free --take--> held --end--> ending --settled--> free        (each `take` begins a new epoch)

That a scheduler is stopped, cut off or dead is found by gRPC's pings (`shared.rpc`), which end the stream and with it
the lease within 2.5 s. A message has to come as well, much less often: an interpreter may be busy for seconds with one
request, but not for ever. `ending` lasts until the step that still runs is over and those after it are dropped.
Reads no clock and calls no gRPC: time is passed in.
"""

from __future__ import annotations

EXPIRY_S = 15.0  # without a message, over a connection that lives


class LeaseHeld(Exception):
    """Another scheduler has the lease, or its last step still runs."""


class Lease:
    """The right to send steps of one epoch."""

    def __init__(self, epoch: int, now_s: float) -> None:
        self.epoch = epoch
        self._heard_s = now_s

    def heard(self, now_s: float) -> None:
        """A message of this lease has come."""
        self._heard_s = now_s

    def expires_in_s(self, now_s: float) -> float:
        """0 or less: it has expired."""
        return self._heard_s + EXPIRY_S - now_s


class LeaseDesk:
    """Issues leases, one at a time, with rising epochs."""

    def __init__(self) -> None:
        self._epoch = 0
        self._held: Lease | None = None
        self._is_ending = False

    @property
    def is_held(self) -> bool:
        """Whether steps may come, or one of an ended lease still runs."""
        return self._held is not None

    def take(self, now_s: float) -> Lease:
        """A lease of a new epoch. Raises LeaseHeld."""
        if self._held is not None:
            why = "its last step is still running" if self._is_ending else "another scheduler holds it"
            raise LeaseHeld(f"the lease of epoch {self._held.epoch} is not free: {why}")
        self._epoch += 1
        self._held = Lease(self._epoch, now_s)
        return self._held

    def end(self, lease: Lease) -> None:
        """The holder is gone; `settled` has to follow."""
        self._is_ending = True

    def settled(self, lease: Lease) -> None:
        """Nothing of the ended lease runs any more."""
        assert self._held is lease, "only the lease that is held can be settled"
        self._held, self._is_ending = None, False
