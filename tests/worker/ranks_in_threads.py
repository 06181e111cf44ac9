"""Ranks of a group as threads of one process, of which one runs at a time until it waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from worker_svc.parallel.ranks import Ranks

T = TypeVar("T")


class _Meeting:
    """Where all ranks bring a tensor."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()  # held by the rank that runs
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def everyones(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = x.clone()
        self.turn.release()
        try:
            self._barrier.wait()
            parts = list(self.parts)
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return parts

    def give_up(self) -> None:
        self._barrier.abort()


class ThreadRank:
    """See `Ranks`; one without a meeting has a part, and computes nothing."""

    def __init__(self, rank: int, size: int, meeting: _Meeting | None = None) -> None:
        self.rank, self.size, self._meeting, self.bytes_sent = rank, size, meeting, 0

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self._everyones(x)
        total = total.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._everyones(x), dim=1)

    def _everyones(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert self._meeting is not None
        return self._meeting.everyones(self.rank, x)


def on_all_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns on each rank; raises what it raises on one."""
    meeting, results, errors = _Meeting(size), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(ThreadRank(rank, size, meeting))
            except BaseException as error:
                errors.append(error)
                meeting.give_up()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [results[rank] for rank in range(size)]
