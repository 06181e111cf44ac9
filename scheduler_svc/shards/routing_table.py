"""What a frontend knows of all workers of all shards, and which of them it gives a group to.

Load comes with reports, many times a second. What this frontend has assigned since is added at once, and dropped when a
report contains it: nothing is counted late, and nothing twice. Knows nothing of links and messages.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler_svc.routing import routing_cost
from scheduler_svc.routing.routing_cost import Ahead, WorkerLoad, cheapest, cost_s
from scheduler_svc.shards.cached_bits import Places, clear_bits, set_bits

FIRST_BLOCKS = 16  # of a prompt that are looked for on every worker; then ever more on those that have all before
LARGEST_LOOK = 262_144  # blocks times workers at once
LOAD_NAMES = tuple(field.name for field in fields(WorkerLoad))
REPORTED_NAMES = (*LOAD_NAMES, "num_ahead_tokens", "num_ahead_slots", "num_cached_blocks", "num_outputs")

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
    num_slots: int  # that it must get at once
    uses_adapter: bool
    places: Callable[[int, int], Places]


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker, by its number in its shard, and what of the prompt it has to compute."""

    shard: int
    number: int
    num_uncached: float
    num_slots: int


class RoutingTable:
    """Workers as columns, a row each."""

    def __init__(self) -> None:
        self._shards: dict[int, dict[int, KnownWorker]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._assigned: dict[int, dict[int, Choice]] = {}  # by shard, then by the group's number there
        self._build([])

    # ---- what shards say --------------------------------------------------------------------------------------------

    def serves(self, shard: int, model: str) -> bool:
        """Whether any worker of the shard has this model; `model`: a fingerprint."""
        return any(worker.model == model for worker in self._shards.get(shard, {}).values())

    def set_workers(self, shard: int, numbers: Collection[int], new: Mapping[int, KnownWorker]) -> None:
        """All that the shard has now, of which some are `new`."""
        known = self._shards.get(shard, {})
        if not new and len(numbers) == len(known):
            return
        bits = {key: self._bits_of(row) for key, row in self._rows.items()}
        loads = {key: [column[row] for column in self._columns.values()] for key, row in self._rows.items()}
        self._shards[shard] = {number: new.get(number) or known[number] for number in numbers}
        self._assigned.setdefault(shard, {})
        self._build([(key, number) for key, workers in self._shards.items() for number in workers])
        for key, row in self._rows.items():
            if key in loads and not (key[0] == shard and key[1] in new):
                for column, value in zip(self._columns.values(), loads[key], strict=True):
                    column[row] = value
                self._bits_of(row)[:] = bits[key]

    def forget(self, shard: int) -> None:
        """It is gone."""
        self.set_workers(shard, (), {})
        self._assigned.pop(shard, None)
        self._shards.pop(shard, None)

    def report(self, shard: int, number: int, load: Mapping[str, float]) -> None:
        """`load`: by `REPORTED_NAMES`."""
        row = self._rows[shard, number]
        for name, column in self._columns.items():
            column[row] = load[name]

    def change_bits(self, shard: int, number: int, came: npt.NDArray[np.uint32], went: npt.NDArray[np.uint32]) -> None:
        """What a worker's cache has got and lost; `came`, `went`: numbers of bits."""
        bits = self._bits_of(self._rows[shard, number])
        set_bits(bits, came)
        clear_bits(bits, went)

    def contains(self, shard: int, last_number: int) -> None:
        """What was reported last contains this frontend's groups up to that number."""
        assigned = self._assigned.get(shard, {})
        for group in list(itertools.takewhile(lambda group: group <= last_number, assigned)):
            self._count(assigned.pop(group), -1)

    # ---- what a frontend asks ---------------------------------------------------------------------------------------

    def assign(self, choice: Choice, group: int) -> None:
        """A group, by its number there, goes to the shard. Numbers rise."""
        self._assigned[choice.shard][group] = choice
        self._count(choice, 1)

    def choose(self, wanted: Wanted, among: Collection[int]) -> Choice | None:
        """The worker of those shards that costs least; None: none of theirs could ever run the group."""
        rows = np.flatnonzero(self._suits(wanted, among))
        if not len(rows):
            return None
        costs, num_uncached = self._costs(rows, wanted)
        num_cached_blocks = self._columns["num_cached_blocks"][rows].astype(np.int64)
        best = int(random.choice(cheapest(costs, num_cached_blocks, np.ones(len(rows), np.bool_))))
        shard, number = self._keys[rows[best]]
        return Choice(shard, number, float(num_uncached[best]), wanted.num_slots)

    def can_begin(self, wanted: Wanted, among: Collection[int]) -> bool:
        """Whether a worker of those shards has slots for the group now, and nobody who waits for them."""
        rows = np.flatnonzero(self._suits(wanted, among))
        ahead = self._ahead()
        free = self._columns["num_slots"] - self._columns["num_taken_slots"] - ahead.num_slots
        return bool((free[rows] >= wanted.num_slots).any())

    def _costs(self, rows: Ints, wanted: Wanted) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The routing cost at each of the workers, and the tokens that it would have to compute."""
        num_uncached = np.maximum(wanted.num_prompt_tokens - self._cached_tokens(rows, wanted), 1.0)
        load = WorkerLoad(**{name: self._columns[name][rows] for name in LOAD_NAMES})
        ahead = self._ahead()
        expected = float(self._columns["num_outputs"][rows].max())  # a shard is no cheaper for knowing less
        num_outputs = min(expected, wanted.max_num_tokens - wanted.num_prompt_tokens)
        asked = routing_cost.Wanted(num_uncached, wanted.num_slots, num_outputs)
        return cost_s(load, Ahead(ahead.num_tokens[rows], ahead.num_slots[rows]), asked), num_uncached

    def _ahead(self) -> Ahead:
        """What waits at each worker, as was reported, and what was assigned since."""
        columns = self._columns
        return Ahead(
            columns["num_ahead_tokens"] + self._since.num_tokens, columns["num_ahead_slots"] + self._since.num_slots
        )

    def _count(self, choice: Choice, sign: int) -> None:
        """Adds what was assigned to the sums of its worker, if that is still there, or takes it out."""
        if (row := self._rows.get((choice.shard, choice.number))) is not None:
            self._since.num_tokens[row] += sign * choice.num_uncached  # whole numbers: exact
            self._since.num_slots[row] += sign * choice.num_slots

    def _suits(self, wanted: Wanted, among: Collection[int]) -> npt.NDArray[np.bool_]:
        suits: npt.NDArray[np.bool_] = np.isin(self._shard, list(among))
        suits &= self._model == self._models.get(wanted.model, -1)
        suits &= (self._max_model_len >= wanted.max_num_tokens) & (self._max_cached >= wanted.num_cached_tokens)
        if wanted.uses_adapter:
            suits &= self._takes_adapters
        return suits

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
        self._since = Ahead(np.zeros(len(keys)), np.zeros(len(keys)))  # what was assigned, of no report yet
        for assigned in self._assigned.values():
            for choice in assigned.values():
                self._count(choice, 1)
        self._columns = {name: np.ones(len(keys)) for name in REPORTED_NAMES}
        ends = np.cumsum([0, *(len(worker.bits) for worker in workers)], dtype=np.int64)
        self._offsets, self._ends = ends[:-1], ends[1:]
        self._flat: Bits = np.concatenate([np.zeros(0, np.uint8), *(worker.bits for worker in workers)])

    def _bits_of(self, row: int) -> Bits:
        return self._flat[self._offsets[row] : self._ends[row]]
