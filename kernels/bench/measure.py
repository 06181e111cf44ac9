"""Cases to rows: microseconds, the share of what the card can do at that size, and of the best that PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kernels.bench.case import Calls, Case, Goal
from kernels.bench.ceilings import Ceilings
from kernels.bench.clock import Clock

_LARGEST_DIFFERENCE = 0.02  # of two results in bfloat16, relative in norm; another order of sums gives a tenth of it


@dataclass(frozen=True, slots=True)
class Peer:
    """What else does the same, at the same shape in the same run. Without `us`, `error` says why it was not timed."""

    name: str
    us: float | None = None
    difference: float | None = None  # of its result from ours: norm of the difference, relative to its own norm
    error: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One case, measured."""

    op: str
    shape: str
    us: float
    gb_per_s: float
    tflops: float
    ceiling: float  # copied GB/s at as many bytes, or TFLOP/s of a product
    of_ceiling: float
    is_bound_by_memory: bool
    peers: tuple[Peer, ...]
    goal: str = ""
    is_goal_met: bool | None = None  # None: no goal, or nothing to compare with

    @property
    def best_peer(self) -> Peer | None:
        """The fastest that gave the same result."""
        timed = [peer for peer in self.peers if peer.us is not None]
        return min(timed, key=lambda peer: peer.us or 0.0, default=None)

    @property
    def of_best_peer(self) -> float | None:
        """Its time by ours: above 1 we are faster."""
        best = self.best_peer
        return None if best is None or best.us is None else best.us / self.us

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = self.best_peer
        return {**asdict(self), "best_peer": best.name if best else None, "of_best_peer": self.of_best_peer}


def measure(cases: Iterable[Case], clock: Clock, report: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Times cases in order; `report` gets a line of each that could not be timed, which is left out.

    Raises the error after which the device computes nothing more, when it is reported: every later case would fail.
    """
    ceilings = Ceilings(clock)
    rows: list[Row] = []
    for case in cases:
        try:
            row = _measure(case, clock, ceilings, rows)
        except Exception as error:  # one that fails must not cost the others
            report(f"{case.op}, {case.shape}: {type(error).__name__}: {error}")
            if is_lost(clock.device):
                raise
            continue
        rows.append(row)
        yield row


def is_lost(device: torch.device) -> bool:
    """Whether it computes nothing more for this process, as after an access to memory that is not there. An error of
    one call, such as a launch that is too large, is not met again here."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _measure(case: Case, clock: Clock, ceilings: Ceilings, earlier: Sequence[Row]) -> Row:
    sets = [case.build() for _ in range(clock.num_sets(case.num_bytes))]
    us = clock.time_us([calls.ours for calls in sets])
    peers = tuple(_peer(name, sets, clock) for name in sets[0].peers)
    del sets
    tflops, gb_per_s = case.flops / us / 1e6, case.num_bytes / us / 1e3
    if case.product is None:
        rate, ceiling = gb_per_s, ceilings.copy_gb_per_s(case.num_bytes)
    else:
        rate, ceiling = tflops, ceilings.matrix_tflops(*case.product)
    row = Row(case.op, case.shape, us, gb_per_s, tflops, ceiling, rate / ceiling, case.product is None, peers)
    if case.goal is None:
        return row
    return replace(row, goal=str(case.goal), is_goal_met=_is_met(case.goal, row, earlier))


def _peer(name: str, sets: Sequence[Calls], clock: Clock) -> Peer:
    try:
        ours = sets[0].ours()  # a copy of it, because a peer that works in place writes to the same memory
        difference = _difference(None if ours is None else ours.clone(), sets[0].peers[name]())
        if difference is not None and not difference <= _LARGEST_DIFFERENCE:
            return Peer(name, difference=difference, error=f"another result, by {difference:.2g}")
        return Peer(name, clock.time_us([calls.peers[name] for calls in sets]), difference)
    except Exception as error:  # a library that does not take this shape, or cannot be captured
        if is_lost(clock.device):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Peer(name, error=f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def _difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float | None:
    if ours is None or theirs is None:
        return None
    wanted = theirs.double()
    return float((ours.double() - wanted).norm() / wanted.norm())


def _is_met(goal: Goal, row: Row, earlier: Sequence[Row]) -> bool | None:
    if goal.is_us:
        return row.us <= goal.value
    if goal.peer:
        times = [peer.us for peer in row.peers if peer.name.split(", ")[0] == goal.peer and peer.us is not None]
        return min(times) / row.us >= goal.value if times else None
    if goal.of_shape:
        rates = [other.tflops for other in earlier if (other.op, other.shape) == (row.op, goal.of_shape)]
        return row.tflops / rates[0] >= goal.value if rates else None
    return row.of_ceiling >= goal.value


_HEADERS = ("operation", "shape", "us", "rate", "of the card", "best of PyTorch", "times as fast", "goal", "met")


def table(rows: Iterable[Row]) -> str:
    """A Markdown table, a row a case."""
    return "\n".join([_line(_HEADERS), _line(["---"] * len(_HEADERS)), *map(line, rows)])


def line(row: Row) -> str:
    """Its line of the table."""
    return _line(_cells(row))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Row) -> tuple[str, ...]:
    best = row.best_peer
    return (
        row.op,
        row.shape,
        f"{row.us:,.1f}",
        f"{row.gb_per_s:,.0f} GB/s" if row.is_bound_by_memory else f"{row.tflops:,.0f} TFLOP/s",
        f"{100 * row.of_ceiling:.0f} %",
        best.name if best else "-",
        f"{row.of_best_peer:.2f}" if row.of_best_peer is not None else "-",
        row.goal or "-",
        {True: "yes", False: "no", None: "-"}[row.is_goal_met],
    )
