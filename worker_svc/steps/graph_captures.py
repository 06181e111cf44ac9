"""Captures graphs of several sizes within a part of a device's memory, and says of which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import structlog

from worker_svc.host.graph_backend import GraphBackend
from worker_svc.steps.failures import is_out_of_memory

log = structlog.get_logger()

Step = TypeVar("Step")


class GraphSizes(NamedTuple):
    """Of the steps that have a graph, ascending."""

    batch_sizes: list[int]  # rows of decode steps
    token_counts: list[int]  # tokens of all others


def capture_within(
    most_bytes: int,
    backend: GraphBackend,
    sizes: Sequence[int],
    capture: Callable[[int], Step],
    step_name: str,
    *,
    is_alone: bool = True,
) -> list[Step]:
    """What `capture` gives for those of `sizes` after which no more than `most_bytes` are taken, in the order of these.

    The graphs that are kept share their memory. Until there is one, each has memory of its own: what a graph that is
    given up has shared with others would not be given back, and no smaller one would fit either.

    Unless the model `is_alone`, other ranks compute with it, and capture the same: one with less room tries all sizes,
    too. In a capture that runs out of memory they wait for what this one no longer computes, so that its error is
    raised.
    """
    kept: list[Step] = []
    # By tensors that all graphs read and write.
    if is_alone and sizes and (num_bytes := backend.bytes_taken()) > most_bytes:
        log.warning(f"no room for graphs of {step_name}s", bytes=num_bytes, of=most_bytes)
        return kept
    for size in sizes:
        if not kept:
            backend.new_pool()
        try:
            step = capture(size)
        except Exception as error:
            if not (is_alone and is_out_of_memory(error)):
                raise
            log.warning(f"no memory for the graph of a {step_name}", size=size)
            continue
        if (num_bytes := backend.bytes_taken()) > most_bytes:
            log.warning(f"no room for the graph of a {step_name}", size=size, bytes=num_bytes, of=most_bytes)
            del step  # a smaller one may fit
            continue
        kept.append(step)
    return kept
