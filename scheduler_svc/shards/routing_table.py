"""What a frontend knows of all workers of all shards, and which of them it gives a group to.

Load comes with reports, many times a second. What this frontend has assigned since is added at once, and dropped by the
report that contains it: nothing is counted late, and nothing twice. Knows nothing of links and messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.shards.cached_bits import Places, clear_bits, set_bits

FIRST_BLOCKS = 16  # of a prompt that are looked for on every worker; then ever more on those that have all before
LARGEST_LOOK = 262_144  # blocks times workers at once
EQUAL_S = 1e-4  # costs that are no further apart are equal: chance decides

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class KnownWorker:
    """What of a worker never changes, and `bits` of its cache as it is described first: packed, the lowest first."""

    model: str
    block_size: int
    max_model_len: int  # tokens
    max_cached_tokens: int
    takes_adapters: bool
    num_bits: int  # 0: it caches no prefixes
    bits: Bits


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a group asks of a worker.

    `places`: gives those of its prompt's full blocks of a size; of an adapter's they depend on the shard, and there
    are none where the shard has not loaded it. For others it is asked about shard -1.
    """

    model: str
    num_prompt_tokens: int
    max_num_tokens: int  # of a sequence
    num_cached_tokens: int  # the most that it may need at once
    uses_adapter: bool
    places: Callable[[int, int], Places]


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill_s`: the computing that the worker is assigned with it."""

    shard: int
    number: int  # of the worker in its shard
    prefill_s: float
    num_cached_tokens: int


class RoutingTable:
    """Workers as columns, a row each."""

    def __init__(self) -> None:
        self._shards: dict[int, dict[int, KnownWorker]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._assigned: dict[int, dict[int, tuple[int, float]]] = {}  # by shard: group to worker and seconds
        self._build([])

    # ---- what shards say --------------------------------------------------------------------------------------------

    def has(self, shard: int, number: int) -> bool:
        return (shard, number) in self._rows

    def serves(self, shard: int, model: str) -> bool:
        return any(worker.model == model for worker in self._shards.get(shard, {}).values())

    def set_workers(self, shard: int, numbers: Collection[int], new: Mapping[int, KnownWorker]) -> None:
        """All that the shard has now, of which some are `new`."""
        known = self._shards.get(shard, {})
        if not new and len(numbers) == len(known):
            return
        bits = {key: self._bits_of(row) for key, row in self._rows.items()}
        load = {key: (self._queued_s[row], self._tokens_per_s[row]) for key, row in self._rows.items()}
        self._shards[shard] = {number: new.get(number) or known[number] for number in numbers}
        self._assigned.setdefault(shard, {})
        self._build([(key, number) for key, workers in self._shards.items() for number in workers])
        for key, row in self._rows.items():
            if key in load and not (key[0] == shard and key[1] in new):
                self._queued_s[row], self._tokens_per_s[row] = load[key]
                self._bits_of(row)[:] = bits[key]

    def forget(self, shard: int) -> None:
        """It is gone."""
        self.set_workers(shard, (), {})
        self._assigned.pop(shard, None)
        self._shards.pop(shard, None)

    def report(self, shard: int, number: int, queued_s: float, tokens_per_s: float) -> None:
        row = self._rows[shard, number]
        self._queued_s[row], self._tokens_per_s[row] = queued_s, max(tokens_per_s, 1e-9)

    def change_bits(self, shard: int, number: int, came: npt.NDArray[np.uint32], went: npt.NDArray[np.uint32]) -> None:
        bits = self._bits_of(self._rows[shard, number])
        set_bits(bits, came)
        clear_bits(bits, went)

    def contains(self, shard: int, last_number: int) -> None:
        """What was reported last contains this frontend's groups up to that number."""
        assigned = self._assigned.get(shard, {})
        for group in [group for group in assigned if group <= last_number]:
            del assigned[group]

    # ---- what a frontend asks ---------------------------------------------------------------------------------------

    def assign(self, choice: Choice, group: int) -> None:
        """A group, by its number there, goes to the shard."""
        self._assigned[choice.shard][group] = choice.number, choice.prefill_s

    def choose(self, wanted: Wanted, among: Collection[int]) -> Choice | None:
        """The worker of those shards that costs least; None: none of theirs could ever run the group."""
        rows = np.flatnonzero(self._suits(wanted, among))
        if not len(rows):
            return None
        num_cached = self._cached_tokens(rows, wanted)
        prefill_s = (wanted.num_prompt_tokens - num_cached) / self._tokens_per_s[rows]
        queued_s = self._queued_s.copy()
        for shard, assigned in self._assigned.items():
            for number, seconds in assigned.values():
                if (row := self._rows.get((shard, number))) is not None:
                    queued_s[row] += seconds
        costs = cost_s(queued_s[rows], prefill_s)
        best = int(random.choice(np.flatnonzero(costs <= costs.min() + EQUAL_S)))
        shard, number = self._keys[rows[best]]
        return Choice(shard, number, float(prefill_s[best]), int(num_cached[best]))

    def _suits(self, wanted: Wanted, among: Collection[int]) -> npt.NDArray[np.bool_]:
        suits = np.isin(self._shard, list(among)) & (self._model == self._models.get(wanted.model, -1))
        suits &= (self._max_model_len >= wanted.max_num_tokens) & (self._max_cached >= wanted.num_cached_tokens)
        return suits & self._takes_adapters if wanted.uses_adapter else suits

    def _cached_tokens(self, rows: Ints, wanted: Wanted) -> Ints:
        """Tokens of the prompt that each worker seems to have; at least one is left to compute."""
        found = np.zeros(len(rows), np.int64)
        kinds = self._block_size[rows] << 16 | (self._shard[rows] + 1 if wanted.uses_adapter else 0)
        for kind in np.unique(kinds[self._masks[rows] > 0]).tolist():
            block_size, shard = kind >> 16, (kind & 0xFFFF) - 1
            members = np.flatnonzero((kinds == kind) & (self._masks[rows] > 0))
            most = (wanted.num_prompt_tokens - 1) // block_size
            where = wanted.places(block_size, shard)[:most].astype(np.int64)
            found[members] = self._longest(rows[members], where) * block_size
        return found

    def _longest(self, rows: Ints, places: Ints) -> Ints:
        """How many of the first blocks each of these workers has."""
        found = np.zeros(len(rows), np.int64)
        alive = np.arange(len(rows))
        first, count = 0, FIRST_BLOCKS
        while first < len(places) and len(alive):
            count = max(1, min(count, LARGEST_LOOK // len(alive)))
            part = places[first : first + count]
            where = part[None, :] & self._masks[rows[alive], None]
            is_set = (self._flat[self._offsets[rows[alive], None] + (where >> 3)] >> (where & 7).astype(np.uint8)) & 1
            has_all = is_set.all(axis=1)
            found[alive] += np.where(has_all, len(part), is_set.argmin(axis=1))
            alive = alive[has_all]
            first, count = first + len(part), 4 * count
        return found

    # ---- columns ----------------------------------------------------------------------------------------------------

    def _build(self, keys: list[tuple[int, int]]) -> None:
        workers = [self._shards[shard][number] for shard, number in keys]
        self._keys = keys
        self._rows = {key: row for row, key in enumerate(keys)}
        self._models = {model: number for number, model in enumerate(dict.fromkeys(each.model for each in workers))}
        self._shard = np.array([shard for shard, _ in keys], np.int64)
        self._model = np.array([self._models[worker.model] for worker in workers], np.int64)
        self._block_size = np.array([worker.block_size for worker in workers], np.int64)
        self._max_model_len = np.array([worker.max_model_len for worker in workers], np.int64)
        self._max_cached = np.array([worker.max_cached_tokens for worker in workers], np.int64)
        self._takes_adapters = np.array([worker.takes_adapters for worker in workers], np.bool_)
        self._masks = np.array([max(0, worker.num_bits - 1) for worker in workers], np.int64)
        self._queued_s = np.zeros(len(keys))
        self._tokens_per_s = np.ones(len(keys))
        ends = np.cumsum([0, *(len(worker.bits) for worker in workers)], dtype=np.int64)
        self._offsets, self._ends = ends[:-1], ends[1:]
        self._flat: Bits = np.concatenate([np.zeros(0, np.uint8), *(worker.bits for worker in workers)])

    def _bits_of(self, row: int) -> Bits:
        return self._flat[self._offsets[row] : self._ends[row]]


def cost_s(queued_s: npt.NDArray[np.float64], prefill_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return queued_s + 1.5 * prefill_s
