"""What is written down of a step loop, in order: events as they are taken, turns, and the steps that come of them.

Each entry has the times that the loop read from its clock from then until the next entry: whoever plays the entries
again hands out the same ones.
"""

from __future__ import annotations

import enum
from array import array
from operator import attrgetter
from typing import Any

from scheduler_svc.core.sequences.sequence import SequenceGroup

ENTRY_BYTES = 400  # of an entry with its times, about, beside the messages that it holds
GROUP_BYTES = 1200  # likewise of a request
HASH_BYTES = 75  # of the hash of a block, which is an object


class Kind(enum.Enum):
    """Of an entry, with the names that they have in a file."""

    BEGIN = "begin"  # of a step loop
    REQUEST = "request"  # was taken
    HELD = "held"  # likewise, by a limit of its tenant
    DUE = "due"  # its turn has come
    END = "end"  # a caller ended a request
    FINISH = "finish"  # the text of an output is at its end
    JOIN = "join"  # a worker
    LOST = "lost"  # a worker, by its stream
    ANSWER = "answer"  # whatever a worker said
    FLUSH = "flush"  # of a prefix cache
    WITHHOLD = "withhold"  # blocks
    WEIGH = "weigh"  # tenants, by a file that has changed
    DRAIN = "drain"  # a worker
    LOAD = "load"  # an adapter
    UNLOAD = "unload"
    ADAPTER = "adapter"  # a worker is done with loading or unloading one
    LOOK = "look"  # somebody looked at the load of workers, which brings it up to date
    TURN = "turn"  # time limits are looked at, and steps made
    STEP = "step"  # was sent
    FAULT = "fault"  # what a record is written for
    STOP = "stop"


class Entry:
    """One of them. `what` depends on the kind, `times` are nanoseconds of the loop's clock."""

    __slots__ = ("kind", "times", "what")

    def __init__(self, kind: Kind, what: Any = None) -> None:
        self.kind = kind
        self.what = what
        self.times = array("q")


_FACTS = (
    "arrival_ns", "num_prompt_tokens", "max_num_tokens", "num_outputs", "best_of", "priority", "tenant", "share",
    "adapter", "model", "has_resumed_tokens", "is_resumed", "num_prompt_logprobs", "wants_logprobs", "parameter_bytes",
)  # fmt: skip
_facts = attrgetter(*_FACTS)


class GroupNote:
    """A request: what was known when it was taken, and the hashes of its blocks as far as anybody asked for them.

    The group is held for as long as it lives, and then only the lists of its hashes.
    """

    __slots__ = ("_ended", "_facts", "_group", "beams", "lengths", "number")

    def __init__(self, group: SequenceGroup) -> None:
        self.number = group.number
        self._facts = _facts(group)
        self.lengths = [(each.index, each.num_tokens, each.status.name) for each in group.sequences]
        search = group.beam_search
        self.beams = None if search is None else search.description()
        self._group: SequenceGroup | None = group
        self._ended: tuple[list[bytes], list[tuple[int, list[bytes]]]] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """By name, as they were."""
        return dict(zip(_FACTS, self._facts, strict=True))

    @property
    def num_hashes(self) -> int:
        """Of its blocks, by now."""
        of_prompt, own = self.hashes()
        return len(of_prompt) + sum(len(hashes) for _, hashes in own)

    def hashes(self) -> tuple[list[bytes], list[tuple[int, list[bytes]]]]:
        """Of the prompt's full blocks, and behind them for each sequence. The lists may grow, and are not changed."""
        group = self._group
        return _hashes(group) if group is not None else self._ended or ([], [])

    def ended(self) -> None:
        """The group is not held any longer."""
        if self._group is not None:
            self._ended, self._group = _hashes(self._group), None


def _hashes(group: SequenceGroup) -> tuple[list[bytes], list[tuple[int, list[bytes]]]]:
    of_prompt, own = group.known_hashes()
    return of_prompt, [] if group.uses_beam_search else own
