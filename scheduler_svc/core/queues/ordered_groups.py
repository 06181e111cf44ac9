"""Groups in the order of their keys: the first at once, any one in or out at about the cost of a binary search.

One sorted list cut into runs, each a list short enough that an insertion into it costs little whatever the whole holds.
Unlike a heap it can be read from the front without being taken apart, and keeps nothing of what was removed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import itemgetter

from scheduler_svc.core.queues.policy import Key
from scheduler_svc.core.sequences.sequence import SequenceGroup

Entry = tuple[Key, SequenceGroup]
MAX_RUN = 1024  # entries; a longer run is cut in half
_last = itemgetter(-1)
_key = itemgetter(0)


def _last_key(run: list[Entry]) -> Key:
    return run[-1][0]


class OrderedGroups:
    """Entries of a key, which nobody else here has, and a group, lowest key first."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[Entry]] = []  # none of them empty

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[Entry]:
        """In order. Nothing may come or go meanwhile."""
        for run in self._runs:
            yield from run

    def after(self, key: Key) -> Iterator[Entry]:
        """Those of higher keys than this, in order. Nothing may come or go meanwhile."""
        start = bisect.bisect_right(self._runs, key, key=_last_key)
        for run in self._runs[start : start + 1]:
            yield from run[bisect.bisect_right(run, key, key=_key) :]
        for index in range(start + 1, len(self._runs)):
            yield from self._runs[index]

    def first(self) -> Entry:
        """The entry of the lowest key; raises IndexError where there is none."""
        return self._runs[0][0]

    def add(self, entry: Entry) -> None:
        """At its place in the order; costs a binary search and a short insertion."""
        runs = self._runs
        if not runs:
            runs.append([entry])
            return
        index = min(bisect.bisect_left(runs, entry, key=_last), len(runs) - 1)
        run = runs[index]
        bisect.insort(run, entry)
        if len(run) > MAX_RUN:
            runs.insert(index + 1, run[MAX_RUN // 2 :])
            del run[MAX_RUN // 2 :]

    def remove(self, entry: Entry) -> None:
        """Takes out an entry that is here; the first, as most often, without a search."""
        index = position = 0
        if self.first() != entry:
            index = bisect.bisect_left(self._runs, entry, key=_last)
            position = bisect.bisect_left(self._runs[index], entry)
        run = self._runs[index]
        assert run[position] == entry, "an entry is not where its key belongs"
        del run[position]
        if not run:
            del self._runs[index]
