"""Hands out ids of fixed-size cache blocks with reference counts. Knows nothing of sequences or tokens.

A block is blank (free, its content means nothing), in use, or idle: free as well, but its content can still be found in
the prefix cache. Blank blocks are used first, then the idle one that was needed the longest time ago. Nobody gets one
that is withheld: so an operator makes a cache smaller while it is in use.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.sequences.block_hashes import BlockIds

__all__ = ["BlockAllocator", "BlockIds"]


class BlockAllocator:
    """A pool of `num_blocks` blocks. Ask `num_free` before `allocate`.

    Args:
        cache: what of the pool can be found by content; None for a pool without, such as the host's.
        keeps_idle: whether content outlives its last use.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None, keeps_idle: bool = True) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._keeps_idle = keeps_idle
        # A stack: [0, num_blank) are blank. The block freed last is used first, while it may still be in a CPU's cache.
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.withheld: list[int] = []
        self.num_to_withhold = 0  # as many as there are, once enough have been given up

    @property
    def num_free(self) -> int:
        """Blank and idle blocks: as many can be allocated."""
        return self._num_blank + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Blocks that one who has the whole cache could have."""
        return self.num_blocks - self.num_to_withhold

    def withhold(self, count: int) -> None:
        """Keeps `count` blocks from all use: free ones at once, the others as they are given up; 0 gives all back."""
        assert 0 <= count <= self.num_blocks
        self.num_to_withhold = count
        returned, self.withheld = self.withheld[count:], self.withheld[:count]
        self._blank[self._num_blank : self._num_blank + len(returned)] = returned
        self._num_blank += len(returned)
        self._withhold_free()

    def _withhold_free(self) -> None:
        count = min(self.num_to_withhold - len(self.withheld), self.num_free)
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        self._num_blank -= count
        self.withheld += self._blank[self._num_blank : self._num_blank + count].tolist()

    def num_in_use(self, blocks: BlockIds) -> int:
        """How many of these have an owner."""
        return int(np.count_nonzero(self.ref_counts[blocks]))

    def allocate(self, count: int) -> BlockIds:
        """`count` blocks, each with one reference."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        self._num_blank -= count
        blocks = self._blank[self._num_blank : self._num_blank + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def adopt(self, hashes: list[bytes], blocks: BlockIds) -> None:
        """Before the first block is used: these are idle, and hold what the hashes say; least recently used first."""
        assert self.cache is not None and self._num_blank == self.num_blocks, "blocks are in use already"
        self.cache.adopt(hashes, blocks)
        self._idle.update(dict.fromkeys(blocks.tolist()))
        blank = self._blank[~np.isin(self._blank, blocks)]
        self._num_blank = len(blank)
        self._blank[: self._num_blank] = blank

    def share(self, blocks: BlockIds) -> None:
        """One more reference to each of `blocks`, which are in use or idle, and named once."""
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            del self._idle[block]
        self.ref_counts[blocks] += 1

    def free(self, blocks: BlockIds) -> None:
        """One reference less to each of `blocks`, which are in use, named once, and in the order of a block table.

        Of those that become idle the last ones go first later on: a prefix is worth more than what followed it.
        """
        counts = self.ref_counts[blocks] - 1
        assert len(counts) == 0 or counts.min() >= 0, "a block was freed twice"
        self.ref_counts[blocks] = counts
        released = blocks[counts == 0]
        if self.cache is not None and len(released):
            is_cached = self.cache.is_cached[released]
            cached = released[is_cached][::-1].tolist()
            if self._keeps_idle:
                for block in cached:
                    self._idle[block] = None
                released = released[~is_cached]
            else:
                self.cache.forget(cached)
        self._blank[self._num_blank : self._num_blank + len(released)] = released
        self._num_blank += len(released)
        if len(self.withheld) < self.num_to_withhold:
            self._withhold_free()

    def withdraw(self, blocks: BlockIds) -> list[int]:
        """What `PrefixCache.withdraw` does; idle blocks among them become blank."""
        assert self.cache is not None
        withdrawn = self.cache.withdraw(blocks)
        self._blank_out([block for block in withdrawn if self.ref_counts[block] == 0])
        return withdrawn

    def flush(self) -> int:
        """Forgets all content, of idle blocks and of those in use; how many could be found before."""
        assert self.cache is not None
        cached = np.flatnonzero(self.cache.is_cached).tolist()
        self.cache.forget(cached)
        self._blank_out([block for block in cached if self.ref_counts[block] == 0])
        return len(cached)

    def _evict(self, count: int) -> None:
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        assert self.cache is not None
        self.cache.forget(evicted)
        self._blank[self._num_blank : self._num_blank + count] = evicted
        self._num_blank += count

    def _blank_out(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._idle[block]
        self._blank[self._num_blank : self._num_blank + len(blocks)] = blocks
        self._num_blank += len(blocks)

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError unless every block is blank once, idle once, withheld once, or referenced.

        What takes long for each block, its place in dictionaries, is looked at for that part of all blocks.
        """
        times_blank = np.bincount(self._blank[: self._num_blank], minlength=self.num_blocks)
        assert not len(times_blank) or times_blank.max() <= 1, "a block is twice among the blank ones"
        times_withheld = np.bincount(np.array(self.withheld, np.int64), minlength=self.num_blocks)
        assert not (times_withheld + times_blank > 1).any(), "a withheld block is twice, or blank as well"
        assert not self.ref_counts[times_withheld > 0].any(), "a withheld block is referenced"
        assert len(self.withheld) == self.num_to_withhold or not self.num_free, "fewer are withheld than could be"
        is_idle = (self.ref_counts == 0) & (times_blank == 0) & (times_withheld == 0)
        assert not self.ref_counts[times_blank > 0].any(), "a block is blank and referenced"
        assert int(is_idle.sum()) == len(self._idle), "a block is lost, or idle and referenced"
        first = part.indices(self.num_blocks)[0]
        assert all(block in self._idle for block in (first + np.flatnonzero(is_idle[part])).tolist()), "a block is lost"
        if self.cache is not None:
            self.cache.check_integrity(part)
            assert not self.cache.is_cached[times_blank + times_withheld > 0].any(), "an unused block can be found"
            assert self.cache.is_cached[is_idle].all(), "an idle block cannot be found"
