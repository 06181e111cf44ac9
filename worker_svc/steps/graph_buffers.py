"""What all graphs of steps over a cache read and write at fixed addresses, besides their own inputs.

Planned beside the cache, and outside of `--cuda-graph-memory`: 1,024 rows of 262,144 logits are a GiB, with which no
graph would have room in the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.gpu.attention.scratch import Scratch


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Of steps of up to S sequences."""

    block_tables: torch.Tensor  # i32[S, blocks of the longest sequence]
    logits: torch.Tensor  # f32[S, vocab]; read before the next pass is replayed
    scratch: Scratch | None  # of attention; None: it needs none

    @classmethod
    def new(
        cls, device: torch.device, max_num_seqs: int, num_blocks: int, vocab_size: int, scratch: Scratch | None = None
    ) -> GraphBuffers:
        """Zeros; `num_blocks` of the longest sequence."""
        block_tables = torch.zeros(max_num_seqs, num_blocks, dtype=torch.int32, device=device)
        return cls(block_tables, torch.zeros(max_num_seqs, vocab_size, device=device), scratch)

    @staticmethod
    def num_bytes(max_num_seqs: int, num_blocks: int, vocab_size: int) -> int:
        """What `new` takes."""
        return max_num_seqs * (num_blocks + vocab_size) * 4

    @property
    def max_num_seqs(self) -> int:
        """S."""
        return len(self.block_tables)
