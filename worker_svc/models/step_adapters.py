"""Which adapter each row of the running step has: said before a forward pass, read by products that adapters add to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.host.uploads import upload

_LEAST_ROWS = 2  # of a pass; a decoder repeats a single one


class StepAdapters:
    """Belongs to one decoder, and to the thread that runs it.

    Attributes:
        slots: i32[at least T], where each row's adapter is; -1: it has none. On the model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slots = self._none = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def is_used(self) -> bool:
        """Whether any row of the step has an adapter."""
        return self.slots is not self._none

    @contextmanager
    def step(self, slots: npt.NDArray[np.int64]) -> Iterator[None]:
        """For a pass of T rows, of which one at least has an adapter; `slots` [T]."""
        padded = np.full(max(slots.size, _LEAST_ROWS), -1, np.int32)
        padded[: slots.size] = slots
        (self.slots,) = upload(self._device, padded)
        try:
            yield
        finally:
            self.slots = self._none
