"""What the ranks that share every layer of a model, or of a stage of it, give each other while they compute."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """These ranks as one of them sees them. Every rank makes the same calls with the same shapes, in the same order,
    and every rank gets the same bits."""

    rank: int  # from 0
    size: int
    bytes_sent: int  # to the others, ever; counted once for each

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, any shape, which may be overwritten with it."""

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, n] of rank 0, then that of rank 1, ...: [rows, size * n]."""


class OnlyRank:
    """A group of one."""

    rank, size, bytes_sent = 0, 1, 0

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return x
