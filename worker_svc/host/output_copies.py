"""What a step has computed, on its way to the host.

On a GPU the copies go over a stream of their own into pinned memory, after what computes them and beside what comes
next: nobody waits for the device before `wait`.

    compute   ... step N ─┬─ step N + 1 ...
    copies                └─ tokens of N ─ event: `wait` returns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch


class OutputCopy(Protocol):
    """Tensors of one step. Used by any one thread at a time."""

    def wait(self) -> None:
        """Returns when they are on the host; raises what the device has run into."""

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The tensors, on the host; after `wait`."""


class OutputCopies(Protocol):
    """Starts copies."""

    @property
    def is_late(self) -> bool:
        """Whether a step may be on its way before the outputs of the one before are here."""

    def start(self, tensors: Sequence[torch.Tensor]) -> OutputCopy:
        """After all work that is queued on the current stream; the tensors may be dropped at once."""


class HostOutputs:
    """Outputs of a CPU are where they belong as soon as they are computed."""

    is_late = False

    def start(self, tensors: Sequence[torch.Tensor]) -> HostOutput:
        """Copies nothing."""
        return HostOutput(tensors)


class HostOutput:
    """The tensors themselves."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        """They are here."""

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Views of the tensors."""
        return tuple([tensor.numpy() for tensor in self._tensors])


class CudaOutputs:
    """Copies of a GPU's outputs."""

    is_late = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, tensors: Sequence[torch.Tensor]) -> CudaOutput:
        """See `OutputCopies`; the host waits for nothing."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        is_done = torch.cuda.Event(blocking=True)  # waiting threads sleep: the model thread may need the core
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)  # its memory is not to be used again before that
            is_done.record(self._stream)
        return CudaOutput(copies, is_done)


class CudaOutput(HostOutput):
    """Pinned copies, there once the event has happened."""

    def __init__(self, copies: Sequence[torch.Tensor], is_done: torch.cuda.Event) -> None:
        super().__init__(copies)
        self._is_done = is_done

    def wait(self) -> None:
        """Sleeps until the copies are done."""
        self._is_done.synchronize()


def output_copies(device: torch.device) -> OutputCopies:
    """The kind of copies for outputs that are computed on this device."""
    return CudaOutputs(device) if device.type == "cuda" else HostOutputs()
