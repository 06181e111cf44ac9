"""How much memory of its device a worker may still take, and how much a piece of work takes at its peak.

A GPU has memory of its own: it is the allocator's reserve that counts there, not what tensors use of it, since the
device lacks whatever is reserved. On a CPU device and host are one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from worker_svc.host import memory


class DeviceMemory(Protocol):
    """Bytes, as they are at the moment of the call."""

    @property
    def is_host(self) -> bool:
        """Whether the host's memory is this very memory."""

    def available_bytes(self) -> int:
        """What may still be taken."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """By how much the memory taken grows at its peak while `work` runs."""

    def give_back(self) -> None:
        """Returns to the device what nothing uses any more."""


class HostMemory:
    """Memory of a worker that computes on the CPU."""

    is_host = True

    def available_bytes(self) -> int:
        """Bytes available without swapping, within the control group's limit."""
        return memory.available_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """By the process's resident memory."""
        return memory.peak_bytes(work)

    def give_back(self) -> None:
        """Nothing is kept back."""


class CudaMemory:
    """Memory of one GPU, of which a worker takes at most `utilization` (0 to 1], what others have taken included."""

    is_host = False

    def __init__(self, device: torch.device, utilization: float) -> None:
        self._device, self._utilization = device, utilization

    def available_bytes(self) -> int:
        """Bytes left of the worker's share of the GPU, and never more than are free."""
        self.give_back()
        free, total = torch.cuda.mem_get_info(self._device)
        return max(free - int((1 - self._utilization) * total), 0)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """By what the allocator reserves."""
        self.give_back()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def give_back(self) -> None:
        """Empties the allocator's cache, which other processes could not use."""
        torch.cuda.empty_cache()


def memory_of(device: torch.device, utilization: float) -> DeviceMemory:
    """`utilization`: share of a GPU's memory that this worker may have; a CPU knows no such share."""
    return CudaMemory(device, utilization) if device.type == "cuda" else HostMemory()
