"""CUDA graphs: work that is launched once, captured, and then launched again by one call with the same addresses.

Everything that only a GPU can do about them is here. Graphs share pools of memory: they are replayed one at a time, and
none keeps anything in them that is read later. A pool is given back when none of its graphs is left, and not before;
torch then takes no other graph into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launches the work once more; waits for nothing."""


class GraphBackend(Protocol):
    """Captures work, and knows what that has cost."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """`work` as a graph; runs it as well. Raises torch.OutOfMemoryError."""

    def new_pool(self) -> None:
        """What is captured from now on shares no memory with what was captured before."""

    def bytes_taken(self) -> int:
        """Bytes of the device's memory taken since this was created."""


class CudaGraphBackend:
    """CUDA graphs on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._free_bytes = self._now_free()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs `work` once, to compile and to take workspaces, and then captures it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and takes workspaces, which may not happen during a capture
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        finally:
            torch.cuda.set_stream(current)  # where the end of a capture fails, torch leaves the thread on the other
        current.wait_stream(self._stream)
        return graph

    def new_pool(self) -> None:
        """See `GraphBackend`."""
        self._pool = torch.cuda.graph_pool_handle()

    def bytes_taken(self) -> int:
        """Bytes of the device's memory taken by all graphs that are left."""
        return self._free_bytes - self._now_free()

    def _now_free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
