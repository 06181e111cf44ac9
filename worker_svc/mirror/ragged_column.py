"""Lists of numbers by slot, of any lengths, read for many slots at once. A list takes no more memory than it needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.mirror.step_columns import Ints


class RaggedColumn:
    """One list a slot; most are empty.

    Attributes:
        counts: [slots], entries of each list.
    """

    def __init__(self, max_num_seqs: int, dtype: npt.DTypeLike = np.int64) -> None:
        self.counts: Ints = np.zeros(max_num_seqs, np.int64)
        self._nothing: npt.NDArray[np.generic] = np.zeros(0, dtype)
        self._lists = [self._nothing] * max_num_seqs

    def set(self, slot: int, values: Sequence[float] | npt.NDArray[np.generic]) -> None:
        """Replaces a slot's list."""
        self._lists[slot] = np.array(values, self._nothing.dtype) if len(values) else self._nothing
        self.counts[slot] = len(values)

    def copy(self, parent: int, child: int) -> None:
        """The child gets the parent's list, which is never changed in place."""
        self._lists[child] = self._lists[parent]
        self.counts[child] = self.counts[parent]

    def take(self, slots: npt.NDArray[np.integer]) -> tuple[Ints, npt.NDArray[np.generic]]:
        """Entries of the lists of `slots`, one list after the other: (which of `slots` each belongs to, the entry)."""
        counts = self.counts[slots]
        owners = np.repeat(np.arange(len(slots)), counts)
        if not owners.size:
            return owners, self._nothing
        return owners, np.concatenate([self._lists[slot] for slot in slots[counts > 0].tolist()])
