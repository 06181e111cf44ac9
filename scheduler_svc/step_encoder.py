"""The step protocol's messages: a decided step as full metadata once and packed columns after, and its answer.

`worker_svc.sequence_states.SequenceStates.apply` is the inverse: what it holds afterwards equals the scheduler's
columns.
"""

from __future__ import annotations

import numpy as np

from protos import inference_pb2, worker_pb2
from scheduler_svc.sequence_columns import Ints, TokenIds
from scheduler_svc.step_plan import Introduction, SchedulerOutputs

U16, U32, I32 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")


def encode(outputs: SchedulerOutputs, step_id: int, resume_after: int | None = None) -> worker_pb2.Step:
    """The message of one step. `resume_after` names the failed step after which the worker goes on with this one."""
    step = worker_pb2.Step(step_id=step_id)
    if resume_after is not None:
        step.resume_after = resume_after
    if outputs.released_slots:
        step.released_slots_u16 = np.array(outputs.released_slots, U16).tobytes()
    for introduction in outputs.introductions:
        step.groups.append(_metadata(introduction))
    if len(outputs.appended_slots):
        _pack_appended(step.block_tables.add().append, outputs)
    _pack_rows(step.rows, outputs)
    return step


def _metadata(introduction: Introduction) -> worker_pb2.SequenceGroupMetadata:
    sequence = introduction.sequence
    group = sequence.group
    params = inference_pb2.SamplingParams()
    params.CopyFrom(group.sampling_params)
    for name in ("stop", "stop_token_ids"):  # decided here, and of any size
        params.ClearField(name)
    return worker_pb2.SequenceGroupMetadata(
        request_id=group.request_id,
        num_prompt_tokens=group.num_prompt_tokens,
        sampling_params=params,
        adapter=group.adapter,
        sequences=[
            worker_pb2.SequenceData(
                slot=sequence.slot,
                index=sequence.index,
                token_ids=sequence.token_ids.tolist(),
                num_computed_tokens=introduction.num_computed_tokens,
                block_table=sequence.block_table.tolist(),
            )
        ],
    )


def _pack_appended(append: worker_pb2.BlockTables, outputs: SchedulerOutputs) -> None:
    append.slots_u16 = outputs.appended_slots.astype(U16).tobytes()
    append.block_ids_u32 = outputs.appended_blocks.astype(U32).tobytes()
    if len(outputs.appended_blocks) > len(outputs.appended_slots):
        append.counts_u16 = outputs.appended_counts.astype(U16).tobytes()


def _pack_rows(message: worker_pb2.Rows, outputs: SchedulerOutputs) -> None:
    rows = outputs.rows
    message.slots_u16 = rows.slots.astype(U16).tobytes()
    message.num_decode_rows = rows.num_decode_rows
    if len(rows) > rows.num_decode_rows:
        message.query_lens_u32 = rows.query_lens[rows.num_decode_rows :].astype(U32).tobytes()
        message.num_samples_u16 = rows.num_samples[rows.num_decode_rows :].astype(U16).tobytes()


def decode(outputs: worker_pb2.SequenceOutputs, num_samples: Ints) -> tuple[TokenIds, Ints, dict[int, str]]:
    """Reads an answer: its token ids, how many of them each row got, and the rows that failed, with their messages."""
    token_ids = np.frombuffer(outputs.token_ids_i32, I32)
    num_tokens = num_samples
    if outputs.num_tokens_u16:
        num_tokens = np.frombuffer(outputs.num_tokens_u16, U16).astype(np.int64)
    return token_ids, num_tokens, {error.row: error.message for error in outputs.row_errors}
