"""The largest logit of every row, and of every chunk of a row: in one pass, so that later ones skip most logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.oracles.reference import CHUNK_SIZE
from kernels.select import kernels_for


@dataclass(frozen=True, slots=True)
class RowMaxima:
    """Maxima of R rows of logits, on their device; NaN where one of the logits is."""

    of_chunks: torch.Tensor  # f32[R, chunks]
    largest: torch.Tensor  # f32[R]

    @classmethod
    def of(cls, logits: torch.Tensor) -> RowMaxima:
        """`logits` f32[R, vocab]."""
        of_chunks = logits.new_empty(logits.shape[0], -(-logits.shape[1] // CHUNK_SIZE))
        kernels_for(logits.device).chunk_maxima(of_chunks, logits)
        return cls(of_chunks, of_chunks.amax(dim=-1))
