"""How a process's memory, threads and files go while a test runs."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import psutil

MIB = 2**20
CLOSED_WITHIN_S = 10.0
SPARE_HANDLES = 4
WARM_UP = 0.3  # of the samples: pools grow, caches fill
NUM_PARTS = 5  # of the samples after that, between which memory is compared

Sample = tuple[float, int]  # a count, and bytes that were resident then


def warm(samples: list[Sample]) -> list[Sample]:
    """Those after warm-up."""
    return samples[int(len(samples) * WARM_UP) :]


def steady_growth(samples: list[Sample]) -> float:
    """Bytes that each further one of the count costs in that part of the run, after warm-up, where it costs least.

    A leak grows in every part. Pools that fill late, and code that is used for the first time, grow in some. A part's
    memory is the median of its samples, so that what comes and goes does not count.
    """
    samples = warm(samples)
    borders = [len(samples) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    parts = [samples[start:end] for start, end in itertools.pairwise(borders)]
    counts = [statistics.fmean(count for count, _ in part) for part in parts]
    levels = [statistics.median(resident for _, resident in part) for part in parts]
    return min((levels[n + 1] - levels[n]) / (counts[n + 1] - counts[n]) for n in range(NUM_PARTS - 1))


class Process:
    """Samples of one process's resident memory over some count, of requests for instance."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._samples: list[Sample] = []

    def sample(self, count: float) -> None:
        self._samples.append((count, self._process.memory_info().rss))

    @property
    def resident_bytes(self) -> int:
        return self._process.memory_info().rss

    @property
    def handles(self) -> tuple[int, int]:
        """Threads and open files."""
        return self._process.num_threads(), self._process.num_fds()

    async def wait_for_handles(self, most: tuple[int, int]) -> None:
        """Until there are hardly more of them: connections close a little late, and gRPC adds threads."""
        deadline = time.monotonic() + CLOSED_WITHIN_S
        while any(now > before + SPARE_HANDLES for now, before in zip(self.handles, most, strict=True)):
            assert time.monotonic() < deadline, f"threads and files: {self.handles}, at first {most}"
            await asyncio.sleep(0.05)

    @property
    def slope(self) -> float:
        """Bytes that each further one of the count costs: least squares over the samples after warm-up."""
        samples = self._warm
        mean_x = sum(x for x, _ in samples) / len(samples)
        mean_y = sum(y for _, y in samples) / len(samples)
        return sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)

    @property
    def steady_growth(self) -> float:
        """See `steady_growth`."""
        return steady_growth(self._samples)

    @property
    def growth_bytes(self) -> int:
        """From the end of warm-up to the last sample."""
        return self._warm[-1][1] - self._warm[0][1]

    def tell(self) -> str:
        first, last = self._warm[0][1] / MIB, self._warm[-1][1] / MIB
        return f"{first:.1f} MiB warm, {last:.1f} MiB at the end, {self.slope:+.0f} bytes a request"

    @property
    def _warm(self) -> list[Sample]:
        return warm(self._samples)
