"""What steps did since somebody began to watch: sums that only grow, so that who misses some misses nothing of them."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from protos import inference_pb2 as pb

MAX_COPIES = 64  # the newest ones
_SUMMED = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "blocks_copied",
    "blocks_swapped_in",
    "blocks_swapped_out",
    "num_preempted",
    "num_swapped_out",
)


class StepTally:
    """Over all workers."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("num_steps", *_SUMMED), 0)
        self._numbers = itertools.count(1)
        self._copies: deque[tuple[int, str, int, int]] = deque(maxlen=MAX_COPIES)

    def take(self, step: pb.StepSummary) -> None:
        """Counts one step."""
        self._sums["num_steps"] += 1
        for name in _SUMMED:
            self._sums[name] += getattr(step, name)
        for copy in step.copies:
            self._copies.append((next(self._numbers), step.worker, copy.source, copy.destination))

    def shown(self) -> dict[str, Any]:
        """The sums, and the newest copies on write: (number, worker, source, destination)."""
        return {**self._sums, "copies": list(self._copies)}
