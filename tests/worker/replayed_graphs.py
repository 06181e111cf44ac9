"""Graphs without a GPU: what was captured is computed again, from the same tensors to the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_svc.host.graph_backend import GraphBackend


class ReplayedGraphs:
    """Counts replays, by capture; `taken` is what it pretends to have taken after each."""

    def __init__(self, device: torch.device) -> None:
        self.replays: list[int] = []
        self.taken: list[int] = [0]
        self._taken_now = 0

    def capture(self, work: Callable[[], None]) -> _Replayed:
        work()
        self.replays.append(0)
        self._taken_now = self.taken.pop(0) if len(self.taken) > 1 else self.taken[0]
        return _Replayed(self, len(self.replays) - 1, work)

    def new_pool(self) -> None:
        pass

    def bytes_taken(self) -> int:
        return self._taken_now


class _Replayed:
    def __init__(self, backend: ReplayedGraphs, index: int, work: Callable[[], None]) -> None:
        self._backend, self._index, self._work = backend, index, work

    def replay(self) -> None:
        self._backend.replays[self._index] += 1
        self._work()


def kept(made: list[ReplayedGraphs]) -> Callable[[torch.device], GraphBackend]:
    """Makes such graphs and puts them into `made`."""

    def make(device: torch.device) -> GraphBackend:
        made.append(ReplayedGraphs(device))
        return made[-1]

    return make
