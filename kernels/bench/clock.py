"""How long calls take on a device: under a CUDA graph, so that no launch is waited for; or on the host, for tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Call = Callable[[], object]

_ROTATED_CACHES = 3  # inputs of so many times the second-level cache, so that none is found there from last time
_MAX_SETS = 128
_GRAPH_US = 2000.0  # of device time in one graph: a few hundred times what starting it costs
_MAX_CALLS_OF_A_GRAPH = 1024
_REPLAYS = 9  # of which the median counts


class Clock(Protocol):
    """Times calls on `device`."""

    device: torch.device

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of inputs of that size calls should take in turns."""

    def time_us(self, calls: Sequence[Call]) -> float:
        """Microseconds of one call: the median over rounds of the mean over `calls`, which take turns.

        Calls have no arguments and allocate nothing that must outlive them. Raises what a call raises.
        """


class GraphClock:
    """Device time of calls, which a CUDA graph must be able to capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def num_sets(self, num_bytes: int) -> int:
        """As many as exceed the second-level cache three times, at least two."""
        return max(2, min(_MAX_SETS, -(-_ROTATED_CACHES * self._cache_bytes // max(1, num_bytes))))

    def time_us(self, calls: Sequence[Call]) -> float:
        """See `Clock`; by CUDA events around replays of one graph."""
        for call in calls:  # compiles, and allocates what libraries keep
            call()
        once_us = max(1.0, self._between_events(calls))
        rounds = max(1, round(_GRAPH_US / (once_us * len(calls))))
        repeated = list(calls) * max(1, min(rounds, _MAX_CALLS_OF_A_GRAPH // len(calls)))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in repeated:
                    call()
        except Exception:
            self._end_capture()
            raise
        replays = [graph.replay]
        self._between_events(replays)
        return statistics.median(self._between_events(replays) for _ in range(_REPLAYS)) / len(repeated)

    def _end_capture(self) -> None:
        """After a capture that failed, PyTorch's random numbers take themselves to be captured: one that succeeds ends
        that."""
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(1, device=self.device).zero_()

    def _between_events(self, calls: Sequence[Call]) -> float:
        """Mean microseconds of a call, from the first call's start to the last one's end."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return 1e3 * float(start.elapsed_time(end)) / len(calls)


class HostClock:
    """Wall time of calls that are done when they return. Runs every line that a GPU would time, where there is none."""

    device = torch.device("cpu")

    def num_sets(self, num_bytes: int) -> int:
        """Two: this clock measures nothing that caches would matter to."""
        return 2

    def time_us(self, calls: Sequence[Call]) -> float:
        """See `Clock`; one round."""
        started_ns = time.perf_counter_ns()
        for call in calls:
            call()
        return (time.perf_counter_ns() - started_ns) / 1e3 / len(calls)
