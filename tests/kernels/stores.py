"""Stores of cache blocks for tests that move them: random bits, compared as such."""

from __future__ import annotations

import torch

from tests.kernels.device import DEVICE


def store(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape).to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
