"""Steps for a model without a scheduler: which sequences compute how many tokens, over blocks that lie scattered."""

from __future__ import annotations

import torch

from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.loader import Model

BLOCK_SIZE = 4


class Stepper:
    """Runs chosen pieces of chosen token sequences through a model and returns the logits of every new token."""

    def __init__(
        self,
        model: Model,
        sequences: list[list[int]],
        cache_dtype: torch.dtype | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        counts = [-(-len(tokens) // block_size) for tokens in sequences]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        self._tables = [[order.pop() for _ in range(count)] for count in counts]
        self._model, self._sequences, self._block_size = model, sequences, block_size
        self._caches = CacheEngine(
            model.config, block_size, sum(counts), 0, cache_dtype or model.config.dtype, model.device
        ).layers

    def step(self, pieces: dict[int, tuple[int, int]], logits_rows: list[int] | None = None) -> dict[int, torch.Tensor]:
        """Compute tokens `first .. last` of each named sequence in one forward pass; f32[last - first, vocab] each.

        With `logits_rows`, which asks for rows of a single sequence, f32[len(logits_rows), vocab].
        """
        block_size = self._block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, tables = [0], []
        for sequence, (first, last) in pieces.items():
            table = self._tables[sequence]
            token_ids += self._sequences[sequence][first:last]
            positions += range(first, last)
            slots += [table[p // block_size] * block_size + p % block_size for p in range(first, last)]
            starts.append(len(token_ids))
            tables.append(table)
        widest = max(map(len, tables))

        def there(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._model.device)

        metadata = AttentionMetadata(
            slot_mapping=there(slots),
            query_starts=there(starts, torch.int32),
            seq_lens=there([last for _, last in pieces.values()], torch.int32),
            block_tables=there([table + [0] * (widest - len(table)) for table in tables], torch.int32),
            max_query_len=max(last - first for first, last in pieces.values()),
            max_seq_len=max(last for _, last in pieces.values()),
        )
        counts = [last - first for first, last in pieces.values()] if logits_rows is None else [len(logits_rows)]
        rows = there(list(range(len(token_ids))) if logits_rows is None else logits_rows)
        logits = self._model.forward(there(token_ids), there(positions), self._caches, metadata, rows)
        return dict(zip(pieces, logits.split(counts), strict=True))
