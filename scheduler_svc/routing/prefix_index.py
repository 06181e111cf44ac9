"""Which workers have which block of a prompt cached: one look-up for all of them, kept current by their caches.

A worker is a bit of a whole number. Entries are exact: caches report every block that can be found from now on, and
every one that no longer can. Knows nothing of sequences or of who is where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.blocks.prefix_cache import PrefixCache


class PrefixIndex:
    """Workers by the hashes of the blocks that they have cached.

    Attributes:
        num_looks: hashes looked up so far, for those who count what a decision costs.
    """

    def __init__(self) -> None:
        self._workers_of: dict[bytes, int] = {}
        self.num_looks = 0

    def __len__(self) -> int:
        return len(self._workers_of)

    def watch(self, number: int, cache: PrefixCache) -> None:
        """The cache of the worker with that number is in the index from now on."""
        watcher = _Watcher(self._workers_of, 1 << number)
        watcher.published(cache.hashes())
        cache.watcher = watcher

    def forget(self, cache: PrefixCache) -> None:
        """It is not any more."""
        if cache.watcher is not None:
            cache.watcher.forgotten(cache.hashes())
            cache.watcher = None

    def num_cached(self, hashes: Sequence[bytes], num_workers: int) -> npt.NDArray[np.int64]:
        """Leading blocks of a chain that each worker has, i64[num_workers]. Ends where nobody has one."""
        counts = np.zeros(num_workers, np.int64)
        have = self._workers_of.get(hashes[0], 0) if hashes else 0
        length = 0
        while have:
            length += 1
            following = have & self._workers_of.get(hashes[length], 0) if length < len(hashes) else 0
            if following != have:
                counts[_bits(have & ~following, num_workers)] = length
            have = following
        self.num_looks += length + 1
        return counts

    def check_integrity(self, caches: Iterable[tuple[int, PrefixCache]]) -> None:
        """Raises AssertionError unless exactly what these caches have is in the index. Reads everything."""
        expected: dict[bytes, int] = {}
        for number, cache in caches:
            for digest in cache.hashes():
                expected[digest] = expected.get(digest, 0) | 1 << number
        assert expected == self._workers_of, "the index and the caches disagree"


class _Watcher:
    """Keeps the index in step with one cache."""

    def __init__(self, workers_of: dict[bytes, int], bit: int) -> None:
        self._workers_of = workers_of
        self._bit = bit

    def published(self, hashes: Iterable[bytes]) -> None:
        workers_of, bit = self._workers_of, self._bit
        for digest in hashes:
            workers_of[digest] = workers_of.get(digest, 0) | bit

    def forgotten(self, hashes: Iterable[bytes]) -> None:
        workers_of, bit = self._workers_of, self._bit
        for digest in hashes:
            left = workers_of[digest] & ~bit
            if left:
                workers_of[digest] = left
            else:
                del workers_of[digest]


def _bits(workers: int, num_workers: int) -> npt.NDArray[np.bool_]:
    data = np.frombuffer(workers.to_bytes(-(-num_workers // 8), "little"), np.uint8)
    return np.unpackbits(data, count=num_workers, bitorder="little").view(np.bool_)
