"""Reads `SequenceGroupMetadata` and checks what can be checked without the mirror's columns. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from protos import inference_pb2, worker_pb2
from worker_svc.errors import ProtocolError
from worker_svc.mirror.bad_words import BadWords
from worker_svc.mirror.sampling_columns import check_supported
from worker_svc.mirror.slot_columns import SlotColumns
from worker_svc.mirror.step_columns import Ints, check_below, read_column


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the mirror does not hold yet."""

    slot: int
    index: int  # in its group
    request_id: str
    adapter: str  # "": none
    params: inference_pb2.SamplingParams
    stop_token_ids: Ints  # with min_tokens
    bad_words: BadWords | None  # of all sequences of the group
    num_prompt_tokens: int
    token_ids: Ints  # prompt and generated so far, at least one
    num_computed_tokens: int
    block_table: Ints  # holds at least the computed tokens


def read_group(group: worker_pb2.SequenceGroupMetadata, states: SlotColumns) -> Iterator[NewSequence]:
    """The sequences of a group, within the bounds of `states`. Raises ProtocolError."""
    params = group.sampling_params
    check_supported(params)
    for name, token_ids in (("allowed_token_ids", params.allowed_token_ids), ("logit_bias", params.logit_bias)):
        if token_ids:
            ids = np.fromiter(token_ids, np.int64, len(token_ids))
            check_below(ids, states.vocab_size, f"{name} in metadata of {group.request_id!r}")
    if group.adapter and group.adapter not in states.loaded_adapters:
        raise ProtocolError(f"adapter {group.adapter!r} is not loaded")
    bad_words = BadWords(word.ids for word in group.bad_words) if group.bad_words else None
    by_slot: dict[int, NewSequence] = {}
    for data in group.sequences:
        if data.HasField("same_as_slot"):
            sequence = _read_copy(group, data, by_slot, states)
        else:
            sequence = _read_sequence(group, data, bad_words, states)
        by_slot[data.slot] = sequence
        yield sequence


def _read_copy(
    group: worker_pb2.SequenceGroupMetadata,
    data: worker_pb2.SequenceData,
    by_slot: dict[int, NewSequence],
    states: SlotColumns,
) -> NewSequence:
    """A child of a sequence in the same message: everything but slot and index is that sequence's."""
    name = f"metadata of {group.request_id!r} for slot {data.slot}"
    _check_slot(group, data, states)
    if data.token_ids or data.num_computed_tokens or data.block_table:
        raise ProtocolError(f"{name} is that of slot {data.same_as_slot}, and brings state of its own")
    if data.same_as_slot not in by_slot:
        raise ProtocolError(f"{name} is that of slot {data.same_as_slot}, which does not come before it")
    return replace(by_slot[data.same_as_slot], slot=data.slot, index=data.index)


def _read_sequence(
    group: worker_pb2.SequenceGroupMetadata,
    data: worker_pb2.SequenceData,
    bad_words: BadWords | None,
    states: SlotColumns,
) -> NewSequence:
    name = f"metadata of {group.request_id!r}"
    _check_slot(group, data, states)
    token_ids = np.fromiter(data.token_ids, np.int64, len(data.token_ids))
    block_table = np.fromiter(data.block_table, np.int64, len(data.block_table))
    if not 0 < token_ids.size <= states.max_model_len:
        raise ProtocolError(f"{name} brings {token_ids.size} tokens, not 1 to {states.max_model_len}")
    check_below(token_ids, states.vocab_size, f"token_ids in {name}")
    if group.num_prompt_tokens > token_ids.size:
        raise ProtocolError(f"{name} says {group.num_prompt_tokens} tokens of a prompt, and brings {token_ids.size}")
    check_below(block_table, states.num_device_blocks, f"block_table in {name}")
    if block_table.size > states.max_blocks:
        raise ProtocolError(f"{name} brings {block_table.size} blocks, more than {states.max_blocks}")
    if data.num_computed_tokens > min(token_ids.size, block_table.size * states.block_size):
        raise ProtocolError(
            f"{name} says {data.num_computed_tokens} tokens computed of {token_ids.size} in {block_table.size} blocks"
        )
    return NewSequence(
        slot=data.slot,
        index=data.index,
        request_id=group.request_id,
        adapter=group.adapter,
        params=group.sampling_params,
        stop_token_ids=read_column(group.stop_token_ids_u32, "<u4", f"stop_token_ids in {name}"),
        bad_words=bad_words,
        num_prompt_tokens=group.num_prompt_tokens,
        token_ids=token_ids,
        num_computed_tokens=data.num_computed_tokens,
        block_table=block_table,
    )


def _check_slot(group: worker_pb2.SequenceGroupMetadata, data: worker_pb2.SequenceData, states: SlotColumns) -> None:
    if data.slot >= states.max_num_seqs:
        raise ProtocolError(f"metadata of {group.request_id!r} for slot {data.slot} of {states.max_num_seqs}")
