"""Where packed weights are written to."""

from __future__ import annotations

from collections.abc import Callable

import torch

NewBytes = Callable[[int], torch.Tensor]  # u8[so many] that nobody else has


def new_bytes(num_bytes: int) -> torch.Tensor:
    """A tensor of its own; see `bytes_in_huge_pages` for what is read in every product."""
    return torch.empty(num_bytes, dtype=torch.uint8)
