"""What the ranks of a parallel group give each other while a model computes."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The group as one of its members sees it. Every rank makes the same calls with the same shapes, in the same order,
    and every rank gets the same bits."""

    rank: int  # from 0
    size: int

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, any shape, which may be overwritten with it."""

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, n] of rank 0, then that of rank 1, ...: [rows, size * n]."""


class OnlyRank:
    """A group of one."""

    rank, size = 0, 1

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return x
