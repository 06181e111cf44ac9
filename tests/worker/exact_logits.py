"""What a model's logits are in float64, and how far from them float32 may be: about as far as `transformers` is.

How much rounding matters is the model's own: the logits of one tiny model are off by 1e-6 of their size, those of
another by 5e-6, on every processor. So no constant is the bound, but the errors of an independent computation in the
same precision, against the same truth. Over all tiny models of the tests the ratio of the two errors' root mean
squares was 0.92 to 1.12.

A product of Octavo sums its n terms in one order, so that a row has the same bits in any batch. Roundings then add
up to about sqrt(n / 24) units of the result, of a sum in p parts to sqrt(n / p / 24): with 16 parts, as a register has,
to a fourth, once n is large. The ratio for SmolLM2, of 576 and 1,536 terms, was 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.float64 import InFloat64

FACTOR = 2.0  # of the library's own errors, for sums of a hundred terms
FACTOR_OF_LONG_SUMS = 5.0
EPS = torch.finfo(torch.float32).eps
LEAST_EXACT = 1e-4  # of the logits' size: a library that is further from its own float64 shows nothing


@dataclass(frozen=True)
class Truth:
    """Of each sequence [length, vocab]: `exact` in float64, `library` as transformers computes it in float32."""

    exact: list[torch.Tensor]
    library: list[torch.Tensor]

    def check(self, found: Iterable[tuple[int, slice, torch.Tensor]], factor: float = FACTOR) -> None:
        """Raises AssertionError where these logits, each with its sequence and rows of it, have errors that are more
        than `factor` times the library's on average, or twice that where they are worst, which varies more."""
        pieces = list(found)
        ours, theirs, size = (
            torch.cat([tensors[i] for i in range(len(pieces))])
            for tensors in (
                [logits.double() - self.exact[i][rows] for i, rows, logits in pieces],
                [self.library[i][rows].double() - self.exact[i][rows] for i, rows, _ in pieces],
                [self.exact[i][rows] for i, rows, _ in pieces],
            )
        )
        scale = _mean(size)
        assert 0 < _mean(theirs) < LEAST_EXACT * scale, "the library's float32 is not near its own float64"
        assert _mean(ours) <= factor * _mean(theirs) + EPS * scale, (_mean(ours), _mean(theirs), scale)
        worst, of_library = float(ours.abs().max()), float(theirs.abs().max())
        assert worst <= 2 * factor * of_library + EPS * float(size.abs().max()), (worst, of_library)

    def check_whole(self, found: Sequence[torch.Tensor], factor: float = FACTOR) -> None:
        """The same of whole sequences, in order."""
        assert len(found) == len(self.exact)
        self.check(((i, slice(None), logits) for i, logits in enumerate(found)), factor)


def truth_of(make: Callable[[torch.dtype], Any], sequences: list[list[int]]) -> Truth:
    """By the model that `make` makes in a given precision, each sequence alone and without a cache."""
    library = _logits(make(torch.float32), sequences)
    with InFloat64():
        exact = _logits(make(torch.float64), sequences)
    assert {logits.dtype for logits in exact} == {torch.float64}
    return Truth(exact, library)


def truth_of_folder(folder: Path, sequences: list[list[int]]) -> Truth:
    from transformers import AutoModelForCausalLM

    # Plain code for experts: the grouped products that are the default need inner sizes that fit their alignment.
    return truth_of(
        lambda dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager"),
        sequences,
    )


def _logits(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]


def _mean(errors: torch.Tensor) -> float:
    """Root mean square."""
    return float(errors.square().mean().sqrt())
