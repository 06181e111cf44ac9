"""Random paged caches for kernel tests: sequences of any lengths whose blocks lie scattered among others' garbage."""

from __future__ import annotations

from typing import Any

import torch


class PagedCase:
    """Arguments of `paged_attention` after `out`, and the same tokens gathered for oracles."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_size: int = 10,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        counts = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = sum(counts) + 3
        shuffled = torch.randperm(num_blocks, generator=generator).int().split([*counts, 3])
        # Entries past a sequence's last block are ids of no block: reading them is a fault.
        self.block_tables = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
        for sequence, blocks in enumerate(shuffled[:-1]):
            self.block_tables[sequence, : len(blocks)] = blocks
        self.query = normal(sum(query_lens), num_heads, head_size)
        self.key_cache = normal(num_blocks, num_kv_heads, block_size, head_size)
        self.value_cache = normal(num_blocks, num_kv_heads, block_size, head_size)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.query_starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.group = num_heads // num_kv_heads
        self.options: dict[str, Any] = {
            "scale": head_size**-0.5,
            "max_query_len": max(query_lens),
            "max_seq_len": max(seq_lens),
        }

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What follows `out`, in order."""
        caches = (self.key_cache, self.value_cache)
        return (self.query, *caches, self.block_tables, self.seq_lens, self.query_starts)

    def gathered(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A sequence's (keys, values), each [num_heads, seq_len, head_size], token by token."""
        block_size = self.key_cache.shape[2]

        def tokens(cache: torch.Tensor, sequence: int) -> torch.Tensor:
            places = [divmod(position, block_size) for position in range(int(self.seq_lens[sequence]))]
            lines = [cache[self.block_tables[sequence, block], :, offset] for block, offset in places]
            return torch.stack(lines, dim=1).repeat_interleave(self.group, dim=0)

        return [(tokens(self.key_cache, s), tokens(self.value_cache, s)) for s in range(self.seq_lens.numel())]
