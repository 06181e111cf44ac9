"""Counts of values in fixed buckets: a value costs a search among a few bounds, a column of them one of numpy's.

`prometheus_client` exports them and does not count them: its histogram takes one value at a time, which costs the step
loop 180 us for the 256 tokens of a step, and a column here 3 us (`python -m benchmarks.beside_libraries`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.shared.tracing.context import TraceContext


class Exemplar(NamedTuple):
    """A value of a request that is traced, and when it came, in s since 1970."""

    value: float
    context: TraceContext
    came_s: float


class Histogram:
    """How many values fell up to each bound, and their sum. One thread writes; others may read at any time.

    Attributes:
        bounds: the upper ends of the buckets, ascending; one more bucket takes what is above the last.
        counts: [bounds + 1], values in each bucket alone.
        total: the sum of all values.
        exemplars: by bucket, the last value of a traced request that fell there.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts: npt.NDArray[np.int64] = np.zeros(len(self.bounds) + 1, np.int64)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        self._edges = np.array(self.bounds)

    def add(self, other: Histogram) -> None:
        """All values of one with the same bounds."""
        assert other.bounds == self.bounds
        self.counts = self.counts + other.counts
        self.total += other.total
        for bucket, exemplar in list(other.exemplars.items()):
            if bucket not in self.exemplars or self.exemplars[bucket].came_s < exemplar.came_s:
                self.exemplars[bucket] = exemplar

    def exemplify(self, value: float, context: TraceContext) -> None:
        """Names a value that is counted otherwise: that of the request whose span this is."""
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar(value, context, time.time())

    def observe(self, value: float, count: int = 1) -> None:
        """`count` values, all the same."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """`values`: [any number]."""
        buckets = self._edges.searchsorted(values)
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.total += float(values.sum())
