"""Moments in the life of a step stream at which a fault hurts most, read off its messages.

A moment is found while a message is on its way: before it is handed on, or right after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from protos import worker_pb2
from tests.chaos.step_proxy import StepProxy
from tests.chaos.step_tracker import Drawn

IsMoment = Callable[[StepProxy, worker_pb2.Step], bool]

HALF_HELD_STOP_STRING = "a stop string half held back"


def _is_chunk(proxy: StepProxy, step: worker_pb2.Step) -> bool:
    """A row that samples nothing: a part of a prompt that is not its end."""
    return bool((np.frombuffer(step.rows.num_samples_u16, "<u2") == 0).any())


def _is_copy_after_fork(proxy: StepProxy, step: worker_pb2.Step) -> bool:
    """The worker has forked in this step or the one before, and is yet to copy what the two may not share."""
    return bool(step.copies.pairs_u32)


def _is_swap_out(proxy: StepProxy, step: worker_pb2.Step) -> bool:
    return bool(step.swap_out.pairs_u32)


def _are_two_in_flight(proxy: StepProxy, step: worker_pb2.Step) -> bool:
    return len(proxy.tracker.steps) >= 2


MOMENTS: Mapping[str, IsMoment | None] = {
    "mid-prefill chunk": _is_chunk,
    "between fork and copy": _is_copy_after_fork,
    "during swap-out": _is_swap_out,
    "two steps in flight": _are_two_in_flight,
    HALF_HELD_STOP_STRING: None,
}
"""By name; None: found in a result, not in a step."""


@dataclass
class Strike:
    """A `Watcher` that strikes once: at the `skip`-th moment of its kind after the first, on whatever worker that is.

    Args:
        moment: a key of MOMENTS.
        half_held: with HALF_HELD_STOP_STRING: a token that brings a part of a stop string.
        is_after: right after the message was handed on, in place of before.
        strike: what happens then.
    """

    moment: str
    strike: Callable[[StepProxy], None]
    skip: int = 0
    is_after: bool = False
    half_held: Drawn | None = None
    has_struck: bool = False

    def on_step(self, proxy: StepProxy, step: worker_pb2.Step) -> None:
        if not self.is_after:
            self._look(proxy, step)

    def on_step_sent(self, proxy: StepProxy, step: worker_pb2.Step) -> None:
        if self.is_after:
            self._look(proxy, step)

    def on_result(self, proxy: StepProxy, drawn: list[Drawn]) -> None:
        if not self.is_after and self.half_held in drawn:
            self._strike(proxy)

    def on_result_sent(self, proxy: StepProxy, drawn: list[Drawn]) -> None:
        if self.is_after and self.half_held in drawn:
            self._strike(proxy)

    def _look(self, proxy: StepProxy, step: worker_pb2.Step) -> None:
        is_moment = MOMENTS[self.moment]
        if self.has_struck or is_moment is None or not is_moment(proxy, step):
            return
        self.skip -= 1
        if self.skip < 0:
            self._strike(proxy)

    def _strike(self, proxy: StepProxy) -> None:
        if not self.has_struck:
            self.has_struck = True
            self.strike(proxy)
