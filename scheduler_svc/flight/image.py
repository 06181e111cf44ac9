"""An image of a step loop's state: every object that a decision may read, copied between two turns.

The graph of objects is walked from a few roots. Each object, list, dictionary and array becomes a node once, however
many refer to it; so what was shared is shared again in what `restored_image` makes of it. Left out are what can be had
from the rest (the indexes of caches), what only looks (statistics), the tokens of sequences, and whatever is called:
links, clocks and sinks are those of whoever restores it.

The walk takes a few microseconds a request, so it takes references and copies, and makes nothing of them.
"""

from __future__ import annotations

import enum
import gc
import itertools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message

from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.blocks.prefix_finder import PrefixFinder
from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.sequences.token_lines import TokenLines
from scheduler_svc.leases.step_statistics import StepStatistics
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.prefix_index import PrefixIndex
from scheduler_svc.tracing.step_trace import StepTrace

NODE_BYTES = 100  # of a node, about, beside arrays
PLAIN = frozenset((type(None), bool, int, float, str, bytes))
GROUP_FIELDS = (
    "number", "num_prompt_tokens", "max_num_tokens", "num_outputs", "best_of", "priority", "tenant", "share", "adapter",
    "model", "arrival_ns", "order", "has_resumed_tokens", "is_resumed", "first_scheduled_ns", "first_token_ns",
    "num_cached_tokens", "num_preemptions", "num_moves", "num_worker_losses", "num_losses_in_all",
    "num_prompt_logprobs", "wants_logprobs", "parameter_bytes",
)  # fmt: skip
SEQUENCE_FIELDS = (
    "index", "slot", "last_generation", "num_pending_tokens", "last_token_ns", "trial_ends_at", "num_swapped_tokens",
    "num_own_tokens",
)  # fmt: skip
SKIPPED: dict[type, frozenset[str]] = {
    PrefixFinder: frozenset(("_found", "_num_held")),
    PrefixCache: frozenset(("_block_of", "_changes", "watcher")),
    PrefixIndex: frozenset(("_workers_of", "num_looks")),
    SequenceColumns: frozenset(("token_ids", "ones", "block_tables", "eos_token_id", "has_stop_token_ids")),
    WorkerHandle: frozenset(("statistics", "link")),
}
# What every request has some of, told by its type alone.
_NODES = frozenset((SequenceGroup, Sequence, list, dict, set, np.ndarray, SequenceColumns, WorkerHandle))
_MANY = frozenset(((PrefixCache, "_hash_of"), (BlockAllocator, "_idle")))
_group_fields, _sequence_fields = attrgetter(*GROUP_FIELDS), attrgetter(*SEQUENCE_FIELDS[:-1])
_Lock = type(threading.Lock())
_ITERATORS: tuple[type, ...] = (type(iter(list[int]())), type(iter(())))


class TooLarge(Exception):
    """The state has more bytes than an image may."""


class NoImage(Exception):
    """There is something in the state that an image cannot have."""


class Ref(int):
    """The node of this number."""


class Inline(NamedTuple):
    """A value that is no node, by what it is: `what` has plain values and these."""

    kind: str
    what: Any


class Node(NamedTuple):
    """`kind` says what of: a class, or one of the containers."""

    kind: Any
    what: Any


class Image(NamedTuple):
    """Nodes by number; `roots` by name; `workers`: numbers of those in it."""

    nodes: list[Node]
    roots: dict[str, int]
    workers: tuple[int, ...]
    num_bytes: int


def image_of(roots: Mapping[str, Any], numbers: Mapping[WorkerHandle, int], most_bytes: int) -> Image:
    """The image of all that can be reached. `numbers`: of the workers. Raises NoImage, and TooLarge for more than
    `most_bytes`."""
    is_collected = gc.isenabled()
    gc.disable()  # which would look at everything there is, for the many small objects that are made here
    try:
        return _Walk(numbers, most_bytes).image(roots)
    finally:
        if is_collected:
            gc.enable()


class _Walk:
    """One walk."""

    def __init__(self, numbers: Mapping[WorkerHandle, int], most_bytes: int) -> None:
        self._numbers, self._most_bytes = numbers, most_bytes
        self._number_of: dict[int, int] = {}  # nodes by the id of what they are of
        self._nodes: list[Node] = []
        self._to_visit: list[Any] = []
        self._num_bytes = 0

    def image(self, roots: Mapping[str, Any]) -> Image:
        named = {name: int(self._ref(root)) for name, root in roots.items()}
        index = 0
        while index < len(self._to_visit):  # nodes are numbered in the order in which they are met
            self._nodes.append(self._node(self._to_visit[index]))
            index += 1
            if self._num_bytes + NODE_BYTES * len(self._to_visit) > self._most_bytes:
                raise TooLarge(f"its state has over {self._most_bytes} bytes, too many for --flight-recorder-memory")
        workers = tuple(number for worker, number in self._numbers.items() if id(worker) in self._number_of)
        return Image(self._nodes, named, workers, self._num_bytes + NODE_BYTES * len(self._nodes))

    def _ref(self, value: Any) -> Ref:
        number = self._number_of.get(id(value))
        if number is None:
            number = self._number_of[id(value)] = len(self._to_visit)
            self._to_visit.append(value)  # and so it stays alive: its id is its own
        return Ref(number)

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in _NODES:
            return self._ref(value)
        if kind is tuple:
            return Inline("tuple", [self._value(each) for each in value])
        if isinstance(value, enum.Enum):
            return Inline("enum", (kind, value.name))
        if isinstance(value, np.generic):
            return Inline("scalar", (value.dtype.str, value.item()))
        if kind is frozenset:
            return Inline("frozenset", [self._value(each) for each in value])
        if isinstance(value, Policy):
            return Inline("policy", None)
        if isinstance(value, tuple):
            return Inline("named", (kind, [self._value(each) for each in value]))
        if isinstance(value, Message):
            return Inline("message", (kind.__name__, value))
        if kind is Future:
            return Inline("future", None)
        if kind is StepTrace:
            return None  # no decision is made from what is traced
        if kind in _ITERATORS:
            return Inline("iterator", [self._value(each) for each in _left_of(value)])
        return self._ref(value)

    def _values(self, values: Any) -> list[Any]:
        value = self._value
        return [each if type(each) in PLAIN else value(each) for each in values]

    def _node(self, value: Any) -> Node:
        kind = type(value)
        if kind is SequenceGroup:
            return Node(kind, (_group_fields(value), self._ref(value.sequences), self._value(value.beam_search)))
        if kind is Sequence:
            columns, host_table = value._columns, value.host_table
            num_own = len(value._own_token_ids) if columns is None else 0
            state = self._value(columns), self._ref(value.group), value.status.name
            host_blocks = host_table.tolist() if len(host_table) else []
            return Node(kind, ((*_sequence_fields(value), num_own), *state, host_blocks))
        if kind is list:
            self._num_bytes += 8 * len(value)
            return Node("list", self._values(value))
        if kind in (dict, OrderedDict):
            return Node(kind.__name__, [self._values(value.keys()), self._values(value.values())])
        if kind is set:
            return Node("set", self._values(value))
        if kind is deque:
            return Node("deque", self._values(value))
        if isinstance(value, np.ndarray):
            return self._array(value)
        if kind is itertools.count:
            return Node("count", int(repr(value)[6:-1]))
        if kind is random.Random:
            return Node("random", value.getstate())
        if kind is TokenLines:
            self._num_bytes += 4 * len(value.before)
            return Node("token_lines", value.before[:])
        if kind is SequenceColumns:
            return Node(kind, {**self._attributes(kind, value), "tables": _tables(value)})
        if kind.__module__.startswith("scheduler_svc."):
            attributes = self._attributes(kind, value)
            if kind is WorkerHandle:
                attributes["link"] = Inline("link", self._numbers[value])
            return Node(kind, attributes)
        raise NoImage(f"nobody provided for a {kind.__module__}.{kind.__name__}")

    def _array(self, array: Any) -> Node:
        if array.dtype == object:
            return Node("objects", self._values(array.tolist()))
        self._num_bytes += array.nbytes
        return Node("array", array.copy())

    def _attributes(self, kind: type, value: Any) -> dict[str, Any]:
        skipped = SKIPPED.get(kind, frozenset())
        attributes = {}
        for name in [*_slots(kind), *getattr(value, "__dict__", ())]:
            each = getattr(value, name)
            if (kind, name) in _MANY:  # plain values: no look at each
                self._num_bytes += 48 * len(each)
                attributes[name] = Inline("many", (type(each), list(each)))
                continue
            if name in skipped or name == "_recorder" or _is_left_out(each):
                continue
            attributes[name] = each if type(each) in PLAIN else self._value(each)
        return attributes


def _is_left_out(value: Any) -> bool:
    """What is called, locks, and what only counts."""
    return isinstance(value, StepStatistics | _Lock) or (callable(value) and not isinstance(value, Policy))


def _tables(columns: SequenceColumns) -> list[tuple[int, Any]]:
    slots = np.flatnonzero(columns.occupied).tolist()
    return [(slot, columns.block_tables[slot, : columns.num_blocks[slot]].copy()) for slot in slots]


def _left_of(iterator: Any) -> list[Any]:
    """What an iterator over a list or a tuple is yet to give; it is not moved."""
    _, arguments, *position = iterator.__reduce__()
    return list(arguments[0])[position[0] if position else 0 :]


@cache
def _slots(kind: type) -> tuple[str, ...]:
    names = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))
