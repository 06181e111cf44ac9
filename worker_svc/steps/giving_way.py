"""When a worker leaves cores to other processes: it computes with fewer threads while they keep them busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import structlog
import torch

from octavo.shared.cores import allowed_cores
from worker_svc.host.busy_cores import CoreTimes, read_core_times, used_by_others
from worker_svc.models import ModelConfig

log = structlog.get_logger()

WINDOW_S = 0.25  # length of one measurement of what others used: 25 ticks of Linux's accounting
# A longer window in which this process computed for less than a part of the time says little of now.
STALE_S, LEAST_BUSY = 1.0, 0.25
# Cores that others may use before a thread is taken out, and the bound below which it comes back. Scheduler and
# clients on the same two cores take 0.2 to 0.4 of one beside SmolLM2-135M, a busy neighbour 0.9.
GIVE_WAY, COME_BACK = 0.75, 0.5


def may_give_way(model: ModelConfig, device: torch.device) -> bool:
    """Whether the number of threads may change from step to step: where it changes no bit of what they compute, and
    cores have not been set aside for them. To be called on the thread that runs the model."""
    return device.type == "cpu" and model.impl == "octavo" and not _is_bound()


def _is_bound() -> bool:
    """Whether OpenMP keeps this thread on cores of its own, as OMP_PROC_BIND and GOMP_CPU_AFFINITY have it do."""
    if not hasattr(os, "sched_getaffinity"):
        return False
    return os.sched_getaffinity(0) != os.sched_getaffinity(os.getpid())


class GivingWay:
    """Sets as many threads as there are cores that others do not keep busy, at least half of all: where others fill the
    machine, one thread would have less than a fair share of it.

    All threads of a pass wait for each other hundreds of times. One that shares its core with a busy process is without
    it for milliseconds at a time, mostly in the middle of something that the others wait for.
    """

    def __init__(
        self,
        read: Callable[[], CoreTimes | None] | None = None,
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it on the thread that runs the model, after
        `compute_threads.set_threads`, whose number is the most that is used.

        Args:
            read: of the cores that this process may use, `num_cores` of them; None where the system does not say.
        """
        cores = allowed_cores()
        self._read = read or (lambda: read_core_times(cores))
        self._clock = clock
        self._most = torch.get_num_threads()
        # Threads beyond the number of cores, which only an option gives, stay.
        self._num_cores = max(len(cores) if num_cores is None else num_cores, self._most)
        self._since = self._read()

    def adapt(self) -> None:
        """Sets the number of threads of the next step; to be called before each, on the same thread."""
        before = self._since
        if before is None or self._most == 1 or (passed_s := self._clock() - before.now) < WINDOW_S:
            return
        self._since = after = self._read()
        if after is None:
            return
        if passed_s > STALE_S and after.this_process - before.this_process < LEAST_BUSY * passed_s:
            return
        free = self._num_cores - used_by_others(before, after)
        threads = torch.get_num_threads()
        wanted = max(min(threads, int(free + GIVE_WAY)), min(self._most, int(free + COME_BACK)), (self._most + 1) // 2)
        if wanted != threads:
            torch.set_num_threads(wanted)
            log.debug("threads give way" if wanted < threads else "threads come back", threads=wanted)
