"""From tokens to the first residual of a decoder: embedding, positions that are learned, norm."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn import functional

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.norm import take_norm
from worker_svc.models.parts import ModelPart, vocabulary_part
from worker_svc.models.products.linear import take_linear


def take_embedding(part: ModelPart, weights: Weights, base: str) -> torch.Tensor:
    """Vectors of this rank's tokens, [tokens, width], as `Weights.take_matrix` has them; `base` is what their names
    begin with."""
    config = part.whole
    style, (token_ids, _) = config.style, vocabulary_part(part.ranks, config.vocab_size)
    name, width = f"{base}{style.names.embedding}.weight", style.embedding_size or config.hidden_size
    return weights.take_matrix([name], [config.vocab_size], width, rows=[token_ids])


class Embedding:
    """What the first stage of a decoder begins with."""

    def __init__(self, part: ModelPart, weights: Weights, base: str, kernels: ModuleType) -> None:
        config = part.whole
        style, names, hidden = config.style, config.style.names, config.hidden_size
        self._style, self._ranks = style, part.ranks
        self._dtype = weights.dtype
        self._token_ids, _ = vocabulary_part(part.ranks, config.vocab_size)
        self.weight = take_embedding(part, weights, base)
        self._project_in, self._positions, self._norm = None, None, None
        if style.embedding_size:
            self._project_in = take_linear(weights, [base + names.project_in], [hidden], style.embedding_size)
        if style.positions == "learned":
            num_rows = style.learned_offset + config.max_positions
            self._positions = weights.take(f"{base}{names.positions}.weight", num_rows, hidden)
        if names.embedding_norm:
            self._norm = take_norm(config, weights, base + names.embedding_norm, hidden, kernels)

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""
        tensors = [self.weight, *([] if self._positions is None else [self._positions])]
        parts = [part for part in (self._project_in, self._norm) if part is not None]
        return sum(tensor.nbytes for tensor in tensors) + sum(part.weight_bytes for part in parts)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of token_ids, positions i64[rows]."""
        embedded = self._of_tokens(token_ids)
        if self._style.embedding_scale != 1.0:  # rounded to the model's type first, as it was in training
            embedded *= torch.tensor(self._style.embedding_scale, dtype=embedded.dtype)
        if self._project_in is not None:
            embedded = self._project_in(embedded)
        if self._positions is not None:
            embedded += functional.embedding(positions + self._style.learned_offset, self._positions)
        if self._norm is not None:
            self._norm(embedded, embedded)
        return embedded

    def _of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[rows, width]; a rank gives zeros for tokens that others have."""
        if self._ranks.size == 1:
            return functional.embedding(token_ids, self.weight).to(self._dtype)
        if not self._token_ids:
            zeros = self.weight.new_zeros(*token_ids.shape, self.weight.shape[1], dtype=self._dtype)
            return self._ranks.add_up(zeros)
        own = token_ids - self._token_ids.start
        is_foreign = (own < 0) | (own >= len(self._token_ids))
        embedded = functional.embedding(own.masked_fill(is_foreign, 0), self.weight).to(self._dtype)
        return self._ranks.add_up(embedded.masked_fill(is_foreign[:, None], 0))
