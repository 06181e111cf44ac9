"""From the last residual of a decoder to logits: norm, and a product with the vocabulary."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn import functional

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.embedding import take_embedding
from worker_svc.models.norm import NoNorm, Norm, take_norm
from worker_svc.models.parts import ModelPart, vocabulary_part
from worker_svc.models.products.linear import take_linear, tied_linear
from worker_svc.models.quantized.fp8_store import Fp8Store


class Head:
    """What the last stage of a decoder ends with."""

    def __init__(
        self, part: ModelPart, weights: Weights, base: str, embedding: torch.Tensor | None, kernels: ModuleType
    ) -> None:
        """`embedding`: of this rank's tokens, where this stage has it: a tied head is the same matrix."""
        config = part.whole
        style, names, hidden = config.style, config.style.names, config.hidden_size
        width, vocab_size = style.embedding_size or hidden, config.vocab_size
        self._ranks, self._vocab_size, self._cap = part.ranks, vocab_size, style.logit_soft_cap
        token_ids, self._most_token_ids = vocabulary_part(part.ranks, vocab_size)
        self._norm: Norm = NoNorm()
        if names.final_norm:
            self._norm = take_norm(config, weights, base + names.final_norm, hidden, kernels)
        self._project_out = None
        if style.embedding_size:
            self._project_out = take_linear(weights, [base + names.project_out], [width], hidden)
        is_tied = config.tie_word_embeddings and not weights.format_of(f"{names.head}.weight")
        if is_tied:
            weights.ignore_all(f"{names.head}.weight")  # not read, and not counted as to be read
        table = base + names.embedding if is_tied else names.head
        # A tied table of few bits is multiplied as it is stored, whatever the embedding has of it.
        if is_tied and not weights.format_of(f"{table}.weight"):
            embedding = take_embedding(part, weights, base) if embedding is None else embedding
            self._product = tied_linear(weights, names.head, embedding)
        else:
            is_exact = isinstance(weights.store, Fp8Store)
            self._product = take_linear(weights, [table], [vocab_size], width, outputs=[token_ids], is_exact=is_exact)

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights occupy on the device; a tied embedding counts here, too, where this is a packed copy
        of it."""
        parts = [self._norm, self._project_out, self._product]
        return sum(part.weight_bytes for part in parts if part is not None)

    def __call__(
        self, residual: torch.Tensor, update: torch.Tensor, least_rows: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """f32[R, vocab_size], contiguous, of R rows; computed with `least_rows` at least. `residual` is overwritten.

        `out`: where they are written; None: to a new tensor.
        """
        num_rows = residual.shape[0]
        if 0 < num_rows < least_rows:
            residual, update = residual.repeat(2, 1), update.repeat(2, 1)
        hidden = torch.empty_like(residual)
        self._norm(hidden, update, residual=residual)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        logits = self._of_all_tokens(self._product(hidden)[:num_rows])
        # One pass over them, whatever their type and wherever a rank's pads were cut off.
        logits = logits.float().contiguous() if out is None else out.copy_(logits)
        if self._cap:
            logits.div_(self._cap).tanh_().mul_(self._cap)
        return logits

    def _of_all_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] of every rank's [R, its tokens]."""
        if self._ranks.size == 1:
            return logits
        padded = functional.pad(logits, (0, self._most_token_ids - logits.shape[1]))
        return self._ranks.side_by_side(padded)[:, : self._vocab_size]
