"""Which groups may join a worker that computes with a bounded number of adapters at once. Names and counters only.

A group whose adapter has no room is passed over, and those behind it go on. That could last for ever while groups of
adapters in use keep coming. So an adapter that was passed over often enough is due: nobody behind it joins the adapter
that has been in use longest. That one runs dry and makes room, while other adapters, and groups without one, are served
as before. Two that are due close two adapters, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Container

MAX_PASSED_OVER = 16


class AdapterGate:
    """The gate of one worker, asked in rounds: each goes through what waits in service order.

        gate.open(active, loaded)
        for group in waiting.candidates(limit):
            if gate.admits(group.adapter):
                <end the round where there is no memory for it>
                gate.admitted(group.adapter)

    Args:
        max_loras: adapters that one step can compute with.
        max_passed_over: groups with an adapter that may join ahead of a waiting one before its adapter is due.
    """

    def __init__(self, max_loras: int, max_passed_over: int = MAX_PASSED_OVER) -> None:
        self.max_loras = max_loras
        self.max_passed_over = max_passed_over
        self._active: dict[str, None] = {}  # in use, longest first
        self._loaded: Container[str] = ()
        self._waiting: dict[str, None] = {}  # found no room in this round
        self._num_due = 0  # of those
        self._passed_over: dict[str, int] = {}  # since the adapter was last admitted

    def open(self, active: Collection[str], loaded: Container[str]) -> None:
        """Begins a round.

        Args:
            active: adapters of all groups that the worker holds; preempted ones come back without asking.
            loaded: adapters that the worker has; groups of others cannot be helped by making room.
        """
        active = set(active) - {""}
        self._active = {name: None for name in self._active if name in active}
        self._active.update(dict.fromkeys(sorted(active)))
        self._loaded = loaded
        self._waiting = {}
        self._num_due = 0
        self._passed_over = {name: times for name, times in self._passed_over.items() if name in loaded}

    def admits(self, adapter: str) -> bool:
        """Whether the next group in service order may join, as far as its adapter ("" for none) goes."""
        if not adapter:
            return True
        if adapter not in self._loaded or adapter in self._waiting:
            return False
        if adapter in self._active:
            return adapter not in list(self._active)[: self._num_due]
        if len(self._active) < self.max_loras:
            return True
        self._waiting[adapter] = None
        self._num_due += self._passed_over.get(adapter, 0) >= self.max_passed_over
        return False

    def may_admit(self, adapter: str) -> bool:
        """Whether some group of this adapter may join in this round; asking changes nothing.

        True where that depends on who is asked about before it.
        """
        if not adapter:
            return True
        has_room = adapter in self._active or len(self._active) < self.max_loras
        return has_room and adapter in self._loaded and adapter not in self._waiting

    def admitted(self, adapter: str) -> None:
        """A group that `admits` let through has joined: it passed over everybody who found no room before it."""
        if not adapter:
            return
        self._active.setdefault(adapter)
        self._passed_over.pop(adapter, None)
        for name in self._waiting:
            self._passed_over[name] = self._passed_over.get(name, 0) + 1
