"""Lists of token ids by slot, of any lengths, that are read for many slots at once without a loop over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.step_columns import Ints, ragged_offsets


class RaggedColumn:
    """One list a slot, as rows of a table that is as wide as the longest list so far; there are few long ones.

    Attributes:
        counts: [slots], entries of each list.
    """

    def __init__(self, max_num_seqs: int, dtype: npt.DTypeLike = np.int64) -> None:
        self.counts: Ints = np.zeros(max_num_seqs, np.int64)
        self._values = np.zeros((max_num_seqs, 0), dtype)

    def set(self, slot: int, values: Sequence[float] | npt.NDArray[np.generic]) -> None:
        """Replaces a slot's list."""
        count = len(values)
        if count > self._values.shape[1]:
            wider = np.zeros((len(self.counts), max(count, 2 * self._values.shape[1])), self._values.dtype)
            wider[:, : self._values.shape[1]] = self._values
            self._values = wider
        self._values[slot, :count] = values
        self.counts[slot] = count

    def copy(self, parent: int, child: int) -> None:
        self._values[child] = self._values[parent]
        self.counts[child] = self.counts[parent]

    def take(self, slots: npt.NDArray[np.integer]) -> tuple[Ints, npt.NDArray[np.generic]]:
        """Entries of the lists of `slots`, one list after the other: (which of `slots` each belongs to, the entry)."""
        counts = self.counts[slots]
        owners = np.repeat(np.arange(len(slots)), counts)
        return owners, self._values[slots[owners], ragged_offsets(counts)]
