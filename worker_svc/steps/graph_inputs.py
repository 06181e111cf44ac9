"""Inputs of captured graphs: bytes at a fixed address, which one copy from the host fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from worker_svc.host.uploads import pack, unpack


class GraphInputs:
    """Of all graphs of a kind, which are replayed one at a time and begin at the same byte."""

    def __init__(self, device: torch.device, largest: Sequence[npt.NDArray[Any]]) -> None:
        """`largest`: arrays of the graph that has the most."""
        packed, _ = pack(largest, pin_memory=False)
        self._bytes = torch.zeros_like(packed, device=device)

    def of(self, template: Sequence[npt.NDArray[Any]]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """What `fill` takes for a graph, u8, and its parts with types and shapes of `template`, which they hold now."""
        packed, places = pack(template, pin_memory=False)
        inputs = self._bytes[: packed.numel()]
        inputs.copy_(packed)
        return inputs, unpack(inputs, template, places)


def fill(inputs: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Copies arrays of the types and shapes of a graph's template; nothing waits. Raises RuntimeError for others."""
    packed, _ = pack(arrays, pin_memory=inputs.device.type == "cuda")
    inputs.copy_(packed, non_blocking=True)
