"""Which device blocks hold which tokens: block tables by slot over a `BlockAllocator`.

Policy asks (`can_allocate`, `num_blocks_missing`), this module acts (`grow`, `free`). Decides nothing itself.
"""

from __future__ import annotations

import enum

import numpy as np

from scheduler_svc.block_allocator import BlockAllocator, BlockIds
from scheduler_svc.sequence_columns import Ints, SequenceColumns


class AllocStatus(enum.Enum):
    OK = "ok"
    LATER = "later"  # not now
    NEVER = "never"  # more than the whole cache


class BlockSpaceManager:
    """Block tables of one worker's sequences.

    Args:
        watermark: share of all blocks that admission leaves free, so that running sequences can grow for a while before
            one of them has to be preempted.
    """

    def __init__(self, columns: SequenceColumns, num_device_blocks: int, watermark: float = 0.01) -> None:
        self.columns = columns
        self.block_size = columns.block_size
        self.allocator = BlockAllocator(num_device_blocks)
        self.watermark_blocks = int(watermark * num_device_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int, num_reserved_blocks: int, is_alone: bool) -> AllocStatus:
        """Whether a sequence of `num_tokens` may start beside what runs.

        `num_reserved_blocks` are free blocks promised to prompts that are still being computed. A sequence that
        `is_alone` may go below the watermark, or one that needs nearly the whole cache would wait for ever.
        """
        needed = self.num_blocks_for(num_tokens)
        if needed > self.allocator.num_blocks:
            return AllocStatus.NEVER
        watermark = 0 if is_alone else self.watermark_blocks
        free = self.allocator.num_free - num_reserved_blocks
        return AllocStatus.OK if free - needed >= watermark else AllocStatus.LATER

    def num_blocks_missing(self, slot: int, num_tokens: int) -> int:
        """Blocks that the slot lacks to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - int(self.columns.num_blocks[slot]))

    def grow(self, slot: int, num_tokens: int) -> BlockIds:
        """Extends the slot's table to hold `num_tokens` tokens and gives the new blocks."""
        held = int(self.columns.num_blocks[slot])
        blocks = self.allocator.allocate(self.num_blocks_missing(slot, num_tokens))
        self.columns.block_tables[slot, held : held + len(blocks)] = blocks
        self.columns.num_blocks[slot] += len(blocks)
        return blocks

    def slots_at_border(self, slots: Ints) -> Ints:
        """Those of `slots` whose next token needs a new block."""
        return slots[self.columns.num_computed_tokens[slots] == self.columns.num_blocks[slots] * self.block_size]

    def grow_by_one(self, slots: Ints) -> BlockIds:
        """Extends each slot's table by one block; entry i of the result went to slots[i]."""
        blocks = self.allocator.allocate(len(slots))
        self.columns.block_tables[slots, self.columns.num_blocks[slots]] = blocks
        self.columns.num_blocks[slots] += 1
        return blocks

    def free(self, slot: int) -> None:
        held = int(self.columns.num_blocks[slot])
        self.allocator.free(self.columns.block_tables[slot, :held])
        self.columns.num_blocks[slot] = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless reference counts are exactly what the block tables hold."""
        self.allocator.check_integrity()
        held = np.zeros(self.allocator.num_blocks, np.int32)
        for slot in np.flatnonzero(self.columns.occupied):
            np.add.at(held, self.columns.block_tables[slot, : self.columns.num_blocks[slot]], 1)
        assert bool((held == self.allocator.ref_counts).all()), "block tables and reference counts disagree"
