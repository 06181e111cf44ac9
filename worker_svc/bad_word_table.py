"""Bad words as rows of one table: what has to stand before the last token of each, and that token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.step_columns import Ints

NOTHING = -1  # pads the begins of shorter words, on the left


class BadWordTable:
    """Rows are given out and taken back; the table is as wide as the longest word so far."""

    def __init__(self) -> None:
        self._begins = np.full((0, 0), NOTHING, np.int64)
        self._ends: Ints = np.zeros(0, np.int64)
        self._free: list[int] = []

    def add(self, words: Sequence[Sequence[int]]) -> list[int]:
        """Rows for words of at least one token each."""
        self._make_room(len(words), max((len(word) - 1 for word in words), default=0))
        rows = [self._free.pop() for _ in words]
        for row, word in zip(rows, words, strict=True):
            self._begins[row] = NOTHING
            if len(word) > 1:
                self._begins[row, -(len(word) - 1) :] = word[:-1]
            self._ends[row] = word[-1]
        return rows

    def remove(self, rows: Sequence[int]) -> None:
        self._free.extend(rows)

    def take(self, rows: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.int64], Ints]:
        """The tokens before the last one, i64[words, longest - 1] with NOTHING on the left, and the last ones."""
        return self._begins[rows], self._ends[rows]

    def _make_room(self, num_rows: int, width: int) -> None:
        held, held_width = self._begins.shape
        more = max(0, num_rows - len(self._free))
        if not more and width <= held_width:
            return
        begins = np.full((held + more, max(width, held_width)), NOTHING, np.int64)
        begins[:held, begins.shape[1] - held_width :] = self._begins
        self._begins = begins
        self._ends = np.append(self._ends, np.zeros(more, np.int64))
        self._free.extend(range(held, held + more))
