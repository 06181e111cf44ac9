"""A reader of the logits of many rows, a few at a time: all at once they may be larger than the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_ROWS_AT_ONCE = 128  # a product with the head of this many rows is as fast, a row, as one of more


@dataclass(frozen=True, slots=True)
class LogitReader:
    """`take` is called with the logits of `rows`, in their order: f32[1 to MAX_ROWS_AT_ONCE, vocab_size] each time."""

    rows: torch.Tensor  # i64[P], row numbers among the tokens of the step
    take: Callable[[torch.Tensor], None]
