"""Which device block holds which prefix: full blocks by a chained hash of everything that their content depends on.

The hash of a block covers its own tokens and, through the hash before it, all tokens in front of them, and at the root
the adapter's generation and the request's `cache_salt`: equal hashes mean equal K and V. Knows nothing of sequences or
of who uses a block; reference counts are the allocator's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequences.block_hashes import BlockIds


@dataclass(slots=True)
class CacheChanges:
    """Hashes of blocks that could be found from some moment on, and of such as could not any more, in any order."""

    published: list[bytes] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)


class CacheWatcher(Protocol):
    """Is told which hashes can be found from now on, and which no more."""

    def published(self, hashes: Iterable[bytes]) -> None:
        """These can be found from now on; none of them could be before."""

    def forgotten(self, hashes: Iterable[bytes]) -> None:
        """These cannot be found any more."""


class PrefixCache:
    """An index over `num_blocks` blocks, in use or idle.

    Attributes (shape [blocks]):
        is_cached: whether the block can be found.
        parents: the block in front of it when it was published, -1 for none; stale once that block is reused, which
            makes `withdraw` take more than it must and never less.
        publishers: `SequenceGroup.number` of the group that computed a cached block.
        is_adopted: whether a cached block was computed under another lease: upon which ones is not known.
        times_forgotten: how often the block was found under a hash and then no more.
        watcher: who is told of what is published and forgotten, if anybody.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.parents: BlockIds = np.full(num_blocks, -1, np.int32)
        self.publishers: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.is_adopted: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.times_forgotten: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._changes: CacheChanges | None = None
        self.watcher: CacheWatcher | None = None
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    def hashes(self) -> Iterable[bytes]:
        """Of all cached blocks, in no order."""
        return self._block_of.keys()

    def find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(
        self, hashes: list[bytes], blocks: BlockIds, parents: BlockIds, publishers: int | list[int] = 0
    ) -> list[int]:
        """Lets each block be found, unless another one with the same content can be; the blocks that now are."""
        published, new = list[int](), list[bytes]()
        block_of, hash_of = self._block_of, self._hash_of
        for digest, block in zip(hashes, blocks.tolist(), strict=True):
            if digest not in block_of:
                block_of[digest] = block
                hash_of[block] = digest
                published.append(block)
                new.append(digest)
        if self._changes is not None:
            self._changes.published += new
        if self.watcher is not None and new:
            self.watcher.published(new)
        self.is_cached[published] = True
        self.parents[blocks] = parents
        self.publishers[blocks] = publishers
        return published

    def adopt(self, hashes: list[bytes], blocks: BlockIds) -> None:
        """Lets blocks be found that hold what was computed before this cache was known of: none of them is cached."""
        self.publish(hashes, blocks, np.full(len(blocks), -1, np.int32), -1)
        self.is_adopted[blocks] = True

    def hashes_of(self, blocks: list[int]) -> list[bytes | None]:
        """None for one that is not cached."""
        return [self._hash_of[block] for block in blocks]

    def forget(self, blocks: list[int]) -> None:
        """The blocks, all cached, are used for something else now."""
        if self._changes is not None:
            self._changes.forgotten.extend(cast(bytes, self._hash_of[block]) for block in blocks)
        if self.watcher is not None:
            self.watcher.forgotten(cast(bytes, self._hash_of[block]) for block in blocks)
        for block in blocks:
            del self._block_of[cast(bytes, self._hash_of[block])]
            self._hash_of[block] = None
        self.is_cached[blocks] = self.is_adopted[blocks] = False
        self.times_forgotten[blocks] += 1

    def withdraw(self, blocks: npt.NDArray[np.integer]) -> list[int]:
        """Forgets blocks whose content is wrong, and all that was computed on top of them; gives those forgotten."""
        is_wrong = np.zeros(len(self.is_cached) + 1, np.bool_)  # the last entry is that of no parent
        is_wrong[blocks] = True
        while True:
            if (is_wrong[:-1] & self.is_adopted).any():  # any other one may have been computed upon it
                is_wrong[:-1] |= self.is_adopted
            more = self.is_cached & is_wrong[self.parents] & ~is_wrong[:-1]
            if not more.any():
                break
            is_wrong[:-1] |= more
        withdrawn: list[int] = np.flatnonzero(self.is_cached & is_wrong[:-1]).tolist()
        self.forget(withdrawn)
        return withdrawn

    def take_changes(self) -> CacheChanges:
        """What has changed since this was asked last; the first time, all that is there. They are kept from then on."""
        changes, self._changes = self._changes, CacheChanges()
        return changes or CacheChanges(published=list(self._block_of))

    def check_integrity(self, part: slice = slice(None)) -> None:
        """Raises AssertionError unless the cached blocks, in that part of all, are found under hashes of their own."""
        assert int(self.is_cached.sum()) == len(self._block_of), "a cached block cannot be found"
        first = part.indices(len(self.is_cached))[0]
        for block in (first + np.flatnonzero(self.is_cached[part])).tolist():
            digest = self._hash_of[block]
            found = None if digest is None else self._block_of.get(digest)
            assert found == block, f"block {block} is cached, and under its hash block {found} is found"
