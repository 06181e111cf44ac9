"""Which blocks are wrong when a model's logits are not finite: those that a group computed, or those that it found.

A group that fails takes back what it computed itself. Blocks that others computed are shared, and a request that harms
only itself must not cost others their cache. They are taken back once two groups have failed over them and nobody has
read them with success since the first failure: then the blocks are wrong, and whoever finds them would fail as well. A
group that holds such blocks does not publish them again before it has drawn over them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints


class SuspectedBlocks:
    """Of one worker's cache. Costs nothing while nobody has failed."""

    def __init__(self, blocks: BlockSpaceManager) -> None:
        self._cache, self._columns = blocks.cache, blocks.columns
        self._accusers: dict[tuple[int, int], int] = {}  # (block, times forgotten): number of the group that failed

    def accuse(self, group: SequenceGroup, blocks: Ints) -> list[int]:
        """`group` failed over `blocks`, all that it held or could find; those that must not be found any more."""
        wrong = []
        for block in blocks.tolist():
            key = block, int(self._cache.times_forgotten[block])
            if not self._cache.is_cached[block] or self._cache.publishers[block] == group.number:
                wrong.append(block)
            elif self._accusers.setdefault(key, group.number) != group.number:
                wrong.append(block)
                del self._accusers[key]
        return wrong

    def acquit(self, sequences: npt.NDArray[np.object_]) -> None:
        """These have been computed, and drawn from, over the blocks in their tables."""
        may_publish = self._columns.may_publish
        if not self._accusers and may_publish.all():
            return
        seated = [sequence for sequence in sequences.tolist() if sequence.slot >= 0]
        may_publish[[sequence.slot for sequence in seated]] = True
        if not self._accusers:
            return
        is_sound = np.zeros(len(self._cache.is_cached), np.bool_)
        for sequence in seated:
            is_sound[sequence.block_table] = True
        self._accusers = {
            (block, times): accuser
            for (block, times), accuser in self._accusers.items()
            if not is_sound[block] and times == self._cache.times_forgotten[block]
        }
