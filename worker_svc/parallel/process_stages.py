"""Stages that are processes, over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import time
from collections import deque

import torch
import torch.distributed as dist


class ProcessStages:
    """See `Stages`. The default process group has to be there.

    Attributes:
        waited_ns: for the stage before. Of a CPU: on a GPU it is the device that waits.
    """

    def __init__(self, stage: int, count: int, rank_before: int, rank_behind: int) -> None:
        """`rank_before`, `rank_behind`: those of the whole group that have the stages beside this one."""
        self.stage, self.count, self._rank_before, self._rank_behind = stage, count, rank_before, rank_behind
        self.bytes_sent = self.waited_ns = 0
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()  # memory that may still be read, oldest first

    def receive(self, out: torch.Tensor) -> None:
        """See `Stages`."""
        begun_ns = time.perf_counter_ns()
        dist.recv(_as_bytes(out), self._rank_before)
        self.waited_ns += time.perf_counter_ns() - begun_ns

    def hand_on(self, x: torch.Tensor) -> None:
        """See `Stages`."""
        data = _as_bytes(x)
        work = dist.isend(data, self._rank_behind)
        assert work is not None, "this process is in no group"
        self._sent.append((work, data))
        self.bytes_sent += data.nbytes
        # gloo says of no transfer that it is over before it has been waited for. That is hardly ever long: there is a
        # step in flight for each stage, so the next one is no more behind.
        while self._sent and (len(self._sent) > self.count or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory: gloo does not know every type."""
    return x.view(-1).view(torch.uint8)
