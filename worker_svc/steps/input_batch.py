"""What the model takes for one step, built from the resolved rows and the mirror, without a loop over sequences.

R rows compute T tokens together. Slot mappings are derived here from block tables, never sent. First as arrays on the
host, then as tensors on the model's device, which all arrays reach in one copy. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import ProtocolError
from worker_svc.host.uploads import upload
from worker_svc.mirror.sequence_states import UNKNOWN, AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import Ints, ragged_offsets
from worker_svc.models.attention import AttentionMetadata
from worker_svc.sampling.last_tokens import LastTokens

if TYPE_CHECKING:
    from kernels.gpu.attention.scratch import Scratch


@dataclass(frozen=True, slots=True)
class InputArrays:
    """The model's input for one step, on the host."""

    token_ids: Ints  # i64[T], row after row; -1 - slot: the token that this slot drew last, see `LastTokens`
    positions: Ints  # i64[T], absolute
    slot_mapping: Ints  # i64[T], block_id * block_size + offset
    query_starts: npt.NDArray[np.int32]  # [R + 1]
    seq_lens: npt.NDArray[np.int32]  # [R]
    block_tables: npt.NDArray[np.int32]  # [R, blocks of the longest]
    logits_rows: Ints  # i64[L], of the T tokens: the last one of each row that samples
    max_query_len: int
    max_seq_len: int
    lacks_tokens: bool  # some are known to the device alone

    def to_device(
        self, device: torch.device, last_tokens: LastTokens | None = None, scratch: Scratch | None = None
    ) -> InputBatch:
        """The tensors; `last_tokens` is needed where tokens are lacking, `scratch` is handed on to attention."""
        token_ids, positions, slot_mapping, logits_rows, query_starts, seq_lens, block_tables = upload(
            device,
            self.token_ids,
            self.positions,
            self.slot_mapping,
            self.logits_rows,
            self.query_starts,
            self.seq_lens,
            self.block_tables,
        )
        if last_tokens is not None and self.lacks_tokens:
            token_ids = last_tokens.fill_in(token_ids)
        attention = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=block_tables,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            scratch=scratch,
        )
        return InputBatch(token_ids, positions, attention, logits_rows)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Tensors of one step, on the model's device."""

    token_ids: torch.Tensor  # i64[T], row after row
    positions: torch.Tensor  # i64[T], absolute
    attention: AttentionMetadata
    logits_rows: torch.Tensor  # i64[L], of the T tokens


def build_input_arrays(states: SequenceStates, rows: AppliedRows, vocab_size: int) -> InputArrays:
    """The input of `rows`, which `states.apply_rows` has just resolved; there is at least one row.

    Raises ProtocolError for a token id that the model has no embedding for: on a GPU it would take the others along.
    """
    slots, query_lens = rows.slots, rows.query_lens
    max_query_len, max_seq_len = int(query_lens.max()), int(rows.seq_lens.max())
    if max_query_len == 1:
        query_starts, token_slots, positions = np.arange(slots.size + 1, dtype=np.int32), slots, rows.context_lens
    else:
        query_starts = np.zeros(slots.size + 1, np.int32)
        np.cumsum(query_lens, out=query_starts[1:])
        token_slots = np.repeat(slots, query_lens)
        positions = np.repeat(rows.context_lens, query_lens) + ragged_offsets(query_lens)
    token_ids = states.token_ids[token_slots, positions].astype(np.int64)
    lacks_tokens = False
    if (is_wrong := _is_outside(token_ids, vocab_size)).any():
        is_on_device = (token_ids == UNKNOWN) & np.repeat(rows.uses_last_sampled, query_lens)
        lacks_tokens = bool(is_on_device.any())
        token_ids = np.where(is_on_device, -1 - token_slots, token_ids)
        is_wrong &= ~is_on_device
        if is_wrong.any():
            token_id, slot = token_ids[is_wrong][0], token_slots[is_wrong][0]
            raise ProtocolError(f"token {token_id} of slot {slot} is outside {vocab_size}")
    num_columns = -(-max_seq_len // states.block_size)
    columns, offsets = np.divmod(positions, states.block_size)
    return InputArrays(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=states.block_tables[token_slots, columns].astype(np.int64) * states.block_size + offsets,
        query_starts=query_starts,
        seq_lens=rows.seq_lens.astype(np.int32),
        block_tables=states.block_tables[slots, :num_columns],
        logits_rows=query_starts[1:][rows.num_samples > 0].astype(np.int64) - 1,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        lacks_tokens=lacks_tokens,
    )


def _is_outside(token_ids: Ints, vocab_size: int) -> npt.NDArray[np.bool_]:
    """One comparison: without their sign, negative ones are larger than any vocabulary."""
    return token_ids.view(np.uint64) >= vocab_size
