"""Ranks that are processes, over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist


class ProcessRanks:
    """See `Ranks`. `group`: the processes of these ranks; None: the default one, which has to be there.

    With `is_ordered` a sum is taken in float32 in the order of the ranks, each of which has gathered all parts: the
    same bits whatever else is in the batch. A library's own sum takes other orders for messages of other sizes.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None, *, is_ordered: bool) -> None:
        self.rank, self.size, self._group, self._is_ordered = rank, size, group, is_ordered
        self.bytes_sent = 0  # that this rank gave the others, counted once for each

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        if not self._is_ordered:
            dist.all_reduce(x, group=self._group)
            self.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size
            return x
        parts = self._gather(x)
        total = parts[0].float()  # a copy, unless it is of float32: then of `parts`, which nobody needs again
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return torch.cat(list(self._gather(x)), dim=1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]."""
        parts = x.new_empty(self.size, *x.shape)
        # As bytes: gloo does not know every type.
        as_bytes = [part.view(torch.uint8) for part in parts.flatten(1)]
        dist.all_gather(as_bytes, x.contiguous().flatten().view(torch.uint8), group=self._group)
        self.bytes_sent += x.nbytes * (self.size - 1)
        return parts
