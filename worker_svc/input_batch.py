"""What the model takes for one step, built from the resolved rows and the mirror, without a loop over sequences.

R rows compute T tokens together. Slot mappings are derived here from block tables, never sent. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.attention import AttentionMetadata
from worker_svc.errors import ProtocolError
from worker_svc.sequence_states import AppliedRows, SequenceStates
from worker_svc.step_columns import ragged_offsets


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Tensors of one step, on the model's device."""

    token_ids: torch.Tensor  # i64[T], row after row
    positions: torch.Tensor  # i64[T], absolute
    attention: AttentionMetadata
    logits_rows: torch.Tensor  # i64[L], of the T tokens: the last one of each row that samples


def build_input_batch(
    states: SequenceStates, rows: AppliedRows, vocab_size: int, device: str | torch.device = "cpu"
) -> InputBatch:
    """The batch of `rows`, which `states.apply_rows` has just resolved; there is at least one row.

    Raises ProtocolError for a token id that the model has no embedding for: on a GPU it would take the others along.
    """
    slots, query_lens = rows.slots, rows.query_lens
    query_starts = np.zeros(slots.size + 1, np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    seq_lens = rows.context_lens + query_lens
    token_slots = np.repeat(slots, query_lens)
    positions = np.repeat(rows.context_lens, query_lens) + ragged_offsets(query_lens)
    token_ids = states.token_ids[token_slots, positions].astype(np.int64)
    if (is_wrong := (token_ids < 0) | (token_ids >= vocab_size)).any():
        raise ProtocolError(
            f"token {token_ids[is_wrong][0]} of slot {token_slots[is_wrong][0]} is outside {vocab_size}"
        )

    max_seq_len = int(seq_lens.max())
    num_columns = -(-max_seq_len // states.block_size)
    block_ids = states.block_tables[token_slots, positions // states.block_size].astype(np.int64)
    attention = AttentionMetadata(
        slot_mapping=_tensor(block_ids * states.block_size + positions % states.block_size, device),
        query_starts=_tensor(query_starts, device),
        seq_lens=_tensor(seq_lens.astype(np.int32), device),
        block_tables=_tensor(states.block_tables[slots, :num_columns], device),
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
    )
    logits_rows = query_starts[1:][rows.num_samples > 0].astype(np.int64) - 1
    return InputBatch(_tensor(token_ids, device), _tensor(positions, device), attention, _tensor(logits_rows, device))


def _tensor(array: np.ndarray, device: str | torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
