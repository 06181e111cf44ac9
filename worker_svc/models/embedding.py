"""From tokens to the first residual of a decoder: embedding, positions that are learned, norm."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn import functional

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.norm import take_norm
from worker_svc.models.parts import ModelPart, vocabulary_part
from worker_svc.models.products.linear import take_linear
from worker_svc.models.quantized.quantized_table import QuantizedTable


def _place_of(part: ModelPart, base: str) -> tuple[str, int, range]:
    """The table's name, the width of its vectors, and this rank's tokens; `base` is what names begin with."""
    style, (token_ids, _) = part.whole.style, vocabulary_part(part.ranks, part.whole.vocab_size)
    return f"{base}{style.names.embedding}.weight", style.embedding_size or part.whole.hidden_size, token_ids


def take_embedding(part: ModelPart, weights: Weights, base: str) -> torch.Tensor:
    """Vectors of this rank's tokens, [tokens, width], as `Weights.take_matrix` has them."""
    name, width, token_ids = _place_of(part, base)
    return weights.take_matrix([name], [part.whole.vocab_size], width, rows=[token_ids])


def _take_table(part: ModelPart, weights: Weights, base: str, device: torch.device) -> torch.Tensor | QuantizedTable:
    """As `take_embedding`; on a CPU in few bits where the checkpoint has it so. A GPU would launch a dozen kernels for
    what it saves."""
    name, width, token_ids = _place_of(part, base)
    if device.type != "cpu" or not weights.format_of(name) or not token_ids:
        return take_embedding(part, weights, base)
    return QuantizedTable(weights.take_quantized(name, part.whole.vocab_size, width, [token_ids], range(width)))


class Embedding:
    """What the first stage of a decoder begins with."""

    def __init__(self, part: ModelPart, weights: Weights, base: str, kernels: ModuleType, device: torch.device) -> None:
        config = part.whole
        style, names, hidden = config.style, config.style.names, config.hidden_size
        self._style, self._ranks = style, part.ranks
        self._dtype = weights.dtype
        _, self._width, self._token_ids = _place_of(part, base)
        self._table = _take_table(part, weights, base, device)
        self._project_in, self._positions, self._norm = None, None, None
        if style.embedding_size:
            self._project_in = take_linear(weights, [base + names.project_in], [hidden], style.embedding_size)
        if style.positions == "learned":
            num_rows = style.learned_offset + config.max_positions
            self._positions = weights.take(f"{base}{names.positions}.weight", num_rows, hidden)
        if names.embedding_norm:
            self._norm = take_norm(config, weights, base + names.embedding_norm, hidden, kernels)

    @property
    def weight(self) -> torch.Tensor | None:
        """What a tied head multiplies by, [tokens, width]; None where this has it in few bits."""
        return self._table if isinstance(self._table, torch.Tensor) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""
        tensors = [self._table, *([] if self._positions is None else [self._positions])]
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
            return self._look_up(token_ids)
        if not self._token_ids:
            zeros = torch.zeros(*token_ids.shape, self._width, dtype=self._dtype, device=token_ids.device)
            return self._ranks.add_up(zeros)
        own = token_ids - self._token_ids.start
        is_foreign = (own < 0) | (own >= len(self._token_ids))
        embedded = self._look_up(own.masked_fill(is_foreign, 0))
        return self._ranks.add_up(embedded.masked_fill(is_foreign[:, None], 0))

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        table = self._table
        found = functional.embedding(rows, table) if isinstance(table, torch.Tensor) else table.look_up(rows)
        return found.to(self._dtype)
