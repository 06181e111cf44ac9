"""One thing to time: an operation at a shape, what it moves and computes at least, and what else can do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Call = Callable[[], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where cases run, and how large they are."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    is_tiny: bool = False  # sizes at which Triton's interpreter takes a moment


@dataclass(frozen=True, slots=True)
class Goal:
    """What is aimed at; with none of the last three: at least `value` of what the card can do."""

    value: float
    peer: str = ""  # at least `value` of the speed of this peer, or of the faster of "PEER" and "PEER, in another way"
    of_shape: str = ""  # at least `value` of the operations a second of the same operation at this shape
    is_us: bool = False  # at most `value` microseconds

    def __str__(self) -> str:
        if self.is_us:
            return f"<= {self.value:.0f} us"
        return f">= {100 * self.value:.0f} % of {self.peer or self.of_shape or 'the card'}"


@dataclass(frozen=True, slots=True)
class Calls:
    """On one set of inputs. A call returns what can be compared with the others' results, or None."""

    ours: Call
    peers: Mapping[str, Call] = field(default_factory=dict)  # by a name that says what it is


@dataclass(frozen=True, slots=True)
class Case:
    """Bound by memory, or with `product` by the matrix units."""

    op: str
    shape: str  # "batch 256, context 1024": unique among the cases of an operation
    num_bytes: int  # every input read once, every output written once
    build: Callable[[], Calls]  # a new set of inputs, random ones
    flops: int = 0
    product: tuple[int, int, int, torch.dtype] | None = None  # m, n, k and type of the one whose rate is the bound
    goal: Goal | None = None
