"""Outputs that are on their way until somebody waits for them, as a GPU's are: a stand-in that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from worker_svc.steps.launched_step import Launched


class LateOutputs:
    """Copies that can be made to fail; `copies` has every one of them."""

    is_late = True

    def __init__(self) -> None:
        self.copies: list[LateOutput] = []

    def start(self, tensors: Sequence[torch.Tensor]) -> LateOutput:
        self.copies.append(LateOutput(tensors))
        return self.copies[-1]


class LateOutput:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors  # a copy on a stream of its own may read them as late as that
        self.is_here = False
        self.error: Exception | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_here = True

    def arrays(self) -> tuple[np.ndarray, ...]:
        assert self.is_here, "read before it was waited for"
        return tuple(tensor.cpu().numpy() for tensor in self._tensors)


class Arrivals:
    """What a pipeline wants called when outputs are here; the test says when."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def when_here(self, launched: Launched, then: Callable[[], Any]) -> None:
        self._calls.append(then)

    def arrive(self, count: int | None = None) -> None:
        """The oldest `count` outputs are here; None: all are."""
        count = len(self._calls) if count is None else min(count, len(self._calls))
        for _ in range(count):
            self._calls.pop(0)()
