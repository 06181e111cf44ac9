"""What the rows of a step must satisfy, checked against the mirror before a row changes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from worker_svc.errors import ProtocolError
from worker_svc.mirror.slot_columns import SlotColumns
from worker_svc.mirror.step_columns import Ints, RowColumns


def check_rows(states: SlotColumns, columns: RowColumns, seq_lens: Ints, tokens_before: Ints, num_tokens: Ints) -> None:
    """Raises ProtocolError, naming a slot. All [R]; `tokens_before`, `num_tokens`: known without and with given tokens.

    Decode rows, of which steps mostly consist, cannot break most of the rules.
    """
    slots, decodes = columns.slots, slice(columns.num_decode_rows)
    _refuse(slots, ~states.occupied[slots], "which is not occupied")
    goes_on = seq_lens[decodes] == tokens_before[decodes]
    _refuse(slots[decodes], ~goes_on, "which has no sampled token to go on from")
    if columns.num_decode_rows < slots.size:
        _check_described(states, columns, seq_lens, tokens_before, num_tokens)
    _refuse(slots, seq_lens > states.num_blocks[slots] * states.block_size, "whose block table is too short")
    samples_beyond = (seq_lens >= states.max_model_len) & (columns.num_samples > 0)
    _refuse(slots, samples_beyond, "which samples beyond the model's length")


def _check_described(
    states: SlotColumns, columns: RowColumns, seq_lens: Ints, tokens_before: Ints, num_tokens: Ints
) -> None:
    """What only rows that are no decode rows can break."""
    slots, inputs, described = columns.slots, columns.inputs, slice(columns.num_decode_rows, None)
    context_lens = seq_lens - columns.query_lens
    is_last, is_given = inputs == worker_pb2.ROW_INPUT_LAST_SAMPLED, inputs == worker_pb2.ROW_INPUT_GIVEN_TOKENS
    computes_unknown = (context_lens > tokens_before) | (seq_lens > num_tokens)
    _refuse(slots, inputs > worker_pb2.ROW_INPUT_GIVEN_TOKENS, "whose input is unknown")
    _refuse(slots[described], is_last[described], "whose input is that of a decode row")
    _refuse(slots, computes_unknown, "which computes beyond its known tokens")
    _refuse(slots, seq_lens > states.max_model_len, f"which computes beyond {states.max_model_len} tokens")
    _refuse(slots, (columns.num_samples > 0) & (seq_lens != num_tokens), "which samples before its last known token")
    _refuse(slots, is_given & (context_lens != tokens_before), "which is given tokens where it knows its own")
    num_given = int(columns.query_lens[is_given].sum())
    if num_given != columns.given_token_ids.size:
        raise ProtocolError(f"{columns.given_token_ids.size} given tokens for rows that compute {num_given}")
    _check_children(states, columns, seq_lens)


def _check_children(states: SlotColumns, columns: RowColumns, seq_lens: Ints) -> None:
    parents = np.flatnonzero((columns.num_samples > 1) & ~states.sampling.use_beam_search[columns.slots])
    counts = columns.num_samples[parents]
    children = columns.child_slots
    if int(counts.sum()) != children.size:
        raise ProtocolError(f"{children.size} child slots for rows that sample {int(counts.sum())} of them")
    if children.size == 0:
        return
    _refuse(children, ~states.occupied[children], "a child that is not occupied")
    is_parent = children == np.repeat(columns.slots[parents], counts)
    _refuse(children, ~is_parent & np.isin(children, columns.slots), "a child that has a row of its own")
    capacity = states.num_blocks[children] * states.block_size
    _refuse(children, np.repeat(seq_lens[parents], counts) > capacity, "a child whose block table is too short")


def _refuse(slots: Ints, is_wrong: npt.NDArray[np.bool_], complaint: str) -> None:
    if is_wrong.any():
        raise ProtocolError(f"a row for slot {slots[is_wrong][0]}, {complaint}")
