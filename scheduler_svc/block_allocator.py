"""Hands out ids of fixed-size cache blocks with reference counts. Knows nothing of sequences or tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]


class BlockAllocator:
    """A pool of `num_blocks` blocks. Ask `num_free` before `allocate`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int32)
        # A stack: [0, num_free) are free. The block freed last is used first, while it may still be in a CPU's cache.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def allocate(self, count: int) -> BlockIds:
        """`count` blocks, each with one reference."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def fork(self, blocks: BlockIds) -> None:
        """One more reference to each of `blocks`, which are in use and named once."""
        assert bool((self.ref_counts[blocks] > 0).all()), "a free block was shared"
        self.ref_counts[blocks] += 1

    def free(self, blocks: BlockIds) -> None:
        """One reference less to each of `blocks`, which are in use and named once."""
        assert bool((self.ref_counts[blocks] > 0).all()), "a block was freed twice"
        self.ref_counts[blocks] -= 1
        released = blocks[self.ref_counts[blocks] == 0]
        self._free[self.num_free : self.num_free + len(released)] = released
        self.num_free += len(released)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free once or referenced."""
        is_free = np.zeros(self.num_blocks, np.bool_)
        is_free[self._free[: self.num_free]] = True
        assert int(is_free.sum()) == self.num_free, "a block is twice in the free list"
        assert bool((is_free == (self.ref_counts == 0)).all()), "a block is lost, or free and referenced"
