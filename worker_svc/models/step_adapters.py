"""Which adapter each row of the running step has: said before a forward pass, read by products that adapters add to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LEAST_ROWS = 2  # of a pass; a decoder repeats a single one


class StepAdapters:
    """Belongs to one decoder, and to the thread that runs it.

    Attributes:
        groups: for each adapter of the step its number and its rows i64[n], ascending; on the model's device.
        of_rows: i32[at least T], the number of each row's adapter; -1: none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.groups: list[tuple[int, torch.Tensor]] = []
        self.of_rows = self._of_no_rows = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def is_used(self) -> bool:
        """Whether any row of the step has an adapter."""
        return bool(self.groups)

    @contextmanager
    def step(self, numbers: torch.Tensor) -> Iterator[None]:
        """For a pass of T rows: i64[T] `numbers` of their adapters in host memory, -1: none."""
        present = [number for number in numbers.unique().tolist() if number >= 0]
        self.groups = [(number, torch.where(numbers == number)[0].to(self._device)) for number in present]
        padded = torch.full((max(numbers.numel(), _LEAST_ROWS),), -1, dtype=torch.int32)
        padded[: numbers.numel()] = numbers
        self.of_rows = padded.to(self._device)
        try:
            yield
        finally:
            self.groups, self.of_rows = [], self._of_no_rows
