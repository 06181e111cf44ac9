"""What attention needs to know of a step beyond queries, keys and values. Built by the input batch, read by the model.

Words, for one sequence in one step (half-open intervals of token positions):

    0 ............ context_len ............ seq_len
    |  in the cache before  |  computed in this step, query_len tokens  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernels.gpu.attention.scratch import Scratch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Of S sequences that compute T tokens together; sequence `s` owns rows `query_starts[s]:query_starts[s + 1]`."""

    slot_mapping: torch.Tensor  # i64[T], block_id * block_size + offset of each new token; negative: not stored
    query_starts: torch.Tensor  # i32[S + 1], rises from 0 to T
    seq_lens: torch.Tensor  # i32[S], tokens of context and query together
    block_tables: torch.Tensor  # i32[S, max_blocks], block ids; entries past a sequence's last block are never read
    max_query_len: int  # the largest query_len
    max_seq_len: int  # the largest seq_len
    scratch: Scratch | None = None  # of kernels that need one: a GPU's; None: each call takes its own

    def shared_options(self) -> dict[str, Any]:
        """What `paged_attention` is given in all layers of one forward pass; to be asked for in each pass anew."""
        return {} if self.scratch is None else {"shared": self.scratch.new_pass()}
