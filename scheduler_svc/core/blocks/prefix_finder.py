"""What a prefix cache has of waiting sequences: looked up once, and only checked from then on.

Each step asks again about the groups that wait. One array says how much of what was found is still there; hashes are
looked up again only from the first block that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.sequences.block_hashes import BlockIds
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints

NO_BLOCKS: BlockIds = np.zeros(0, np.int32)
MAX_HELD = 262_144  # blocks, and 16 for each look: some 4 MB, after which everything is looked up once more
Hashes = Callable[[int, int], list[bytes]]  # of the blocks [first, last)


class _Found(NamedTuple):
    """Blocks under the first hashes of a chain, and how often each had been forgotten by then."""

    root: bytes
    blocks: BlockIds
    times_forgotten: Ints


class PrefixFinder:
    """Finds longest cached prefixes. The prompt's blocks are looked for once a group, the others once a sequence."""

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._found: WeakKeyDictionary[SequenceGroup | Sequence, _Found] = WeakKeyDictionary()
        self._num_held = 0  # at most, as far as that is known

    def find(self, sequence: Sequence) -> BlockIds:
        """The longest cached prefix of a sequence: at least one token is left to compute, or nothing could be drawn.

        None of it is of use while the logprobs of its prompt are still to come.
        """
        most = (sequence.num_tokens - 1) // self._block_size
        if not most or not len(self._cache) or sequence.group.awaits_prompt_logprobs:
            return NO_BLOCKS
        of_prompt = self._find_of_prompt(sequence.group, most)
        own = self._find_own(sequence, most, len(of_prompt))
        return np.concatenate([of_prompt, own]) if len(own) else of_prompt

    def find_distinct(self, group: SequenceGroup) -> BlockIds:
        """All blocks in the longest cached prefixes of a group's unfinished sequences."""
        sequences = group.unfinished()
        longest = max((sequence.num_tokens for sequence in sequences), default=1)
        most = (longest - 1) // self._block_size
        if not most or not len(self._cache) or group.awaits_prompt_logprobs:
            return NO_BLOCKS
        of_prompt = self._find_of_prompt(group, most)
        if most <= group.num_prompt_tokens // self._block_size:
            return of_prompt
        found = [self._find_own(s, (s.num_tokens - 1) // self._block_size, len(of_prompt)) for s in sequences]
        own = [blocks for blocks in found if len(blocks)]
        return np.concatenate([of_prompt, np.unique(np.concatenate(own))]) if own else of_prompt

    def _find_of_prompt(self, group: SequenceGroup, most: int) -> BlockIds:
        hashes = group.prompt_hashes(self._block_size)
        return self._find(group, group, lambda start, end: hashes[start:end], min(most, len(hashes)))

    def _find_own(self, sequence: Sequence, most: int, num_of_prompt: int) -> BlockIds:
        """Of the blocks behind the prompt's full ones, of which `num_of_prompt` were found."""
        first = sequence.group.num_prompt_tokens // self._block_size
        if num_of_prompt < first or most <= first:
            return NO_BLOCKS

        def hashes(start: int, end: int) -> list[bytes]:
            return sequence.hashes(first + start, first + end, self._block_size)

        return self._find(sequence, sequence.group, hashes, most - first)

    def _find(self, owner: SequenceGroup | Sequence, group: SequenceGroup, hashes: Hashes, most: int) -> BlockIds:
        known = self._found.get(owner)
        blocks = NO_BLOCKS if known is None or known.root != group.hash_root else self._still_there(known)
        if len(blocks) < most:
            more = self._cache.find(hashes(len(blocks), most))
            if more or (known is not None and len(blocks) < len(known.blocks)):
                blocks = np.append(blocks, np.array(more, np.int32))
                self._remember(owner, _Found(group.hash_root, blocks, self._cache.times_forgotten[blocks]))
        return blocks[:most]

    def _remember(self, owner: SequenceGroup | Sequence, found: _Found) -> None:
        """Also of groups that run by now, or wait for another worker: all is forgotten where it becomes much."""
        self._num_held += len(found.blocks) + 16
        if self._num_held > MAX_HELD:
            self._found.clear()
            self._num_held = 0
        self._found[owner] = found

    def _still_there(self, known: _Found) -> BlockIds:
        is_gone = self._cache.times_forgotten[known.blocks] != known.times_forgotten
        return known.blocks[: int(is_gone.argmax())] if is_gone.any() else known.blocks
