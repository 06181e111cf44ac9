"""From the nodes of an image back to the objects of a step loop, which then goes on from there.

The file names classes, and only those of this package are made, without a call of anything that is theirs. An image is
of one version's classes: one that others cannot take is refused.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from google.protobuf import json_format

from protos import worker_pb2
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.blocks.prefix_finder import PrefixFinder
from scheduler_svc.core.queues.policy import Policy
from scheduler_svc.core.sequences.sequence import SequenceStatus
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.sequences.token_lines import TokenLines
from scheduler_svc.flight.errors import BadRecord
from scheduler_svc.flight.hidden import digest_of
from scheduler_svc.flight.replayed_groups import EOS, ReplayedGroup, ReplayedSequence, group_of_image
from scheduler_svc.leases.step_statistics import StepStatistics
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink
from scheduler_svc.routing.prefix_index import PrefixIndex

PACKAGE = "scheduler_svc."
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": list, "set": set, "deque": deque, "dict": dict, "OrderedDict": OrderedDict,
}  # fmt: skip
_MESSAGES = {"WorkerInfo": worker_pb2.WorkerInfo, "InitializeResponse": worker_pb2.InitializeResponse}


class RestoredImage:
    """Objects by the numbers of their nodes.

    Args:
        roots: objects that exist, by the names that they have in the image: they are given the state of those.
        link_of: a worker's link by its number.
        hashes: of requests, by their numbers.
    """

    def __init__(
        self,
        image: Mapping[str, Any],
        roots: Mapping[str, Any],
        link_of: Callable[[int], WorkerLink],
        hashes: Mapping[int, Any],
        policy: Policy,
    ) -> None:
        self._nodes: list[Any] = image["nodes"]
        self._link_of = link_of
        self._policy = policy
        self._hashes = hashes
        self._given = {number: roots[name] for name, number in image["roots"].items() if name in roots}
        try:
            self._objects = [self._begun(number, node) for number, node in enumerate(self._nodes)]
            for made, node in zip(self._objects, self._nodes, strict=True):
                self._fill(made, node)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BadRecord(f"the state that it begins with is not one of this version of Octavo ({what})") from error
        self.roots = {name: self._objects[number] for name, number in image["roots"].items()}
        self.groups = [each for each in self._objects if isinstance(each, ReplayedGroup)]
        self.workers: dict[int, WorkerHandle] = {
            node[2]["link"][1]: made
            for made, node in zip(self._objects, self._nodes, strict=True)
            if isinstance(made, WorkerHandle)
        }

    # ---- an object for each node ------------------------------------------------------------------------------------

    def _begun(self, number: int, node: list[Any]) -> Any:
        kind = node[0]
        if number in self._given:
            return self._given[number]
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]()
        if kind == "group":
            return group_of_image(node[1], self._hashes.get(node[1]["number"]))
        if kind == "sequence":
            return ReplayedSequence.__new__(ReplayedSequence)
        if kind == "array":
            return np.array(node[3], np.dtype(node[1])).reshape(node[2])
        if kind == "token_lines":
            return TokenLines.of_unknown_tokens(node[1])
        if kind == "objects":
            return np.full(len(node[1]), None, object)
        if kind == "count":
            return itertools.count(node[1])
        if kind == "random":
            made = random.Random()
            made.setstate((node[1], tuple(node[2]), node[3]))
            return made
        if kind == "object":
            named = _class(node[1])
            return named.__new__(named)
        raise ValueError(f"a node of kind {kind!r}")

    def _fill(self, made: Any, node: list[Any]) -> None:
        kind = node[0]
        if kind in ("list", "deque"):
            made.clear()
            made.extend(self._values(node[1]))
        elif kind == "set":
            made.update(self._values(node[1]))
        elif kind in ("dict", "OrderedDict"):
            made.clear()
            made.update(zip(self._values(node[1]), self._values(node[2]), strict=True))
        elif kind == "objects":
            for entry, value in enumerate(self._values(node[1])):
                made[entry] = value
        elif kind == "group":
            made.sequences = self._value(node[2])
            made.beam_search = self._value(node[3])
        elif kind == "sequence":
            self._fill_sequence(made, *node[1:])
        elif kind == "object":
            for name, value in node[2].items():
                if name != "tables":
                    object.__setattr__(made, name, self._value(value))
            _complete(made, node[2])

    def _fill_sequence(
        self, made: ReplayedSequence, fields: dict[str, Any], columns: Any, group: Any, host_table: list[int]
    ) -> None:
        columns, tokens = self._value(columns), np.zeros(fields["num_own_tokens"], np.int32)
        made.__init__(self._value(group), fields["index"], tokens)  # type: ignore[misc]  # its group is made by now
        for name, value in fields.items():
            if name not in ("index", "num_own_tokens", "status"):
                setattr(made, name, value)
        made.status = SequenceStatus[fields["status"]]
        made.host_table, made._columns = np.array(host_table, np.int32), columns

    # ---- values -----------------------------------------------------------------------------------------------------

    def _values(self, forms: list[Any]) -> list[Any]:
        return [self._value(form) for form in forms]

    def _value(self, form: Any) -> Any:
        if not isinstance(form, list):
            return form
        kind, *what = form
        if kind == "ref":
            return self._objects[what[0]]
        if kind == "hash":
            return digest_of(what[0])
        if kind == "tuple":
            return tuple(self._values(what[0]))
        if kind == "many":
            return self._values(what[0])
        if kind == "frozenset":
            return frozenset(self._values(what[0]))
        if kind == "enum":
            return _class(what[0])[what[1]]
        if kind == "named":
            return _class(what[0])(*self._values(what[1]))
        if kind == "scalar":
            return np.dtype(what[0]).type(what[1])
        if kind == "message":
            return json_format.ParseDict(what[1], _MESSAGES[what[0]](), ignore_unknown_fields=True)
        if kind == "iterator":
            return iter(self._values(what[0]))
        if kind == "link":
            return self._link_of(what[0])
        if kind == "policy":
            return self._policy
        if kind == "stops":
            return np.array([EOS], np.int64)
        if kind == "future":
            future: Future[int] = Future()
            future.set_running_or_notify_cancel()
            return future
        raise ValueError(f"a value of kind {kind!r}")


def _class(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    if not module.startswith(PACKAGE):
        raise ValueError(f"{name} is none of {PACKAGE}")
    found = getattr(import_module(module), kind)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{name} is no class")
    return found


def _complete(made: Any, attributes: Mapping[str, Any]) -> None:
    """What was left out of the image, as it follows from the rest."""
    if isinstance(made, SequenceColumns):
        slots, lengths = made.max_num_seqs, made.max_model_len
        made.token_ids = np.zeros((slots, lengths), np.int32)
        made.block_tables = np.zeros((slots, -(-lengths // made.block_size)), np.int32)
        for slot, blocks in attributes["tables"][1]:
            made.block_tables[slot, : len(blocks)] = blocks
        made.eos_token_id = np.full(slots, EOS, np.int64)
        made.has_stop_token_ids = np.zeros(slots, np.bool_)
        made.ones = np.ones(slots, np.int64)
        made.ones.flags.writeable = False
    elif isinstance(made, PrefixCache):
        made._block_of = {digest: block for block, digest in enumerate(made._hash_of) if digest is not None}
        made._changes = made.watcher = None
    elif isinstance(made, PrefixFinder):
        made._found, made._num_held = WeakKeyDictionary(), 0
    elif isinstance(made, PrefixIndex):
        made._workers_of, made.num_looks = {}, 0
    elif isinstance(made, WorkerHandle):
        made.statistics = StepStatistics()
    elif "_idle" in attributes:  # of an allocator
        made._idle = OrderedDict(dict.fromkeys(made._idle))
