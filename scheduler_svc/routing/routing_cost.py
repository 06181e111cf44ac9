"""What it costs, in seconds, to give a request to a worker: one formula, over numbers or over arrays of all workers.

    cost = Q + 1.5 P + 0.1 D

    Q   the wait before its prompt is computed: for the tokens that are assigned or reserved there and not computed yet,
        or, where it is longer, for slots and blocks to come free
    P   its own tokens that are not cached there, at that worker's speed. Weighed by more than 1, as they hold up those
        who come after it, too
    D   the time that its output tokens will take there, beside those that run. A tenth of it: a little patience is
        better than a slow or crowded worker, but nobody waits long beside an idle one

Knows nothing of workers, queues or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PROMPT_WEIGHT = 1.5
OUTPUT_WEIGHT = 0.1

Numbers = Any  # float, or f64[workers]: which one is the caller's choice, for all fields alike


@dataclass(slots=True)
class WorkerLoad:
    """What the formula reads of a worker.

    Attributes:
        tokens_per_s: of prompts, beside the decodes that run.
        late_s: by how much the answer to its oldest step is overdue.
        num_uncomputed: known tokens of groups there that have begun, not computed by an answered step.
        base_s, token_s: a step takes `base_s + token_s * tokens`.
        turnover_s: for how long a request occupies its slot.
        num_slots, num_taken_slots: sequences at once, and those that run or are to come back.
        num_blocks, num_taken_blocks: of the cache, and those in use.
        block_size: tokens.
    """

    tokens_per_s: Numbers
    late_s: Numbers
    num_uncomputed: Numbers
    base_s: Numbers
    token_s: Numbers
    turnover_s: Numbers
    num_slots: Numbers
    num_taken_slots: Numbers
    num_blocks: Numbers
    num_taken_blocks: Numbers
    block_size: Numbers


@dataclass(slots=True)
class Ahead:
    """What waits at a worker before the request, and is not cached there: by policy order."""

    num_tokens: Numbers
    num_slots: Numbers


@dataclass(slots=True)
class Wanted:
    """A request, as a worker would have to compute it."""

    num_uncached: Numbers
    num_slots: int
    num_outputs: float  # tokens of one sequence that are expected


def wait_s(load: WorkerLoad, ahead: Ahead, wanted: Wanted) -> Numbers:
    """Q."""
    for_tokens = (load.num_uncomputed + ahead.num_tokens) / load.tokens_per_s
    slots = (load.num_taken_slots + ahead.num_slots + wanted.num_slots) / load.num_slots
    num_tokens = ahead.num_tokens + wanted.num_uncached + wanted.num_slots * wanted.num_outputs
    num_blocks = num_tokens / load.block_size
    blocks = (load.num_taken_blocks + num_blocks) / load.num_blocks
    # What is lacking, as a share of all there is, comes free in that share of a turnover.
    lacking = np.maximum(np.maximum(slots, blocks) - 1.0, 0.0)
    return np.maximum(for_tokens, lacking * load.turnover_s) + load.late_s


def cost_s(load: WorkerLoad, ahead: Ahead, wanted: Wanted) -> Numbers:
    """The whole formula."""
    return wait_s(load, ahead, wanted) + own_s(load, ahead, wanted)


def own_s(load: WorkerLoad, ahead: Ahead, wanted: Wanted) -> Numbers:
    """All of it but Q."""
    prompt_s = wanted.num_uncached / load.tokens_per_s
    num_rows = np.minimum(load.num_taken_slots + ahead.num_slots + wanted.num_slots, load.num_slots)
    outputs_s = wanted.num_outputs * (load.base_s + load.token_s * num_rows)
    return PROMPT_WEIGHT * prompt_s + OUTPUT_WEIGHT * outputs_s


def cheapest(
    costs: npt.NDArray[np.float64], num_cached_blocks: npt.NDArray[np.int64], is_open: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """The workers, of those that are open, which cost the least and of these have the least in their caches.

    Costs are estimates: what is within 2 % and a millisecond of the least counts as equal. Where none is a number, all
    that are open do.
    """
    costs = np.where(is_open & ~np.isnan(costs), costs, np.inf)
    least = costs[costs.argmin()]
    if least == np.inf:
        return is_open.nonzero()[0]
    equal: npt.NDArray[np.int64] = (costs <= 1.02 * least + 1e-3).nonzero()[0]
    if len(equal) < 2:
        return equal
    cached = num_cached_blocks[equal]
    least_cached: npt.NDArray[np.int64] = equal[cached == cached.min()]
    return least_cached
