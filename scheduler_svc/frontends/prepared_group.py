"""A `SequenceGroup` on its way from the frontend that prepared it to the core that runs it."""

from __future__ import annotations

import numpy as np

from protos import frontend_pb2
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.frontends.frontend_messages import apply_counters, encode_counters
from scheduler_svc.requests.group_limits import best_of, new_beam_search, num_outputs


def encode_group(
    group: SequenceGroup, number: int, *, reads_logprobs: bool, replaces: bool, is_moved: bool = False
) -> frontend_pb2.PreparedGroup:
    """A group that nobody has scheduled yet, or, where it `is_moved`, another core before."""
    num_prompt_tokens = group.num_prompt_tokens
    message = frontend_pb2.PreparedGroup(
        number=number,
        request_id=group.request_id,
        tenant=group.tenant,
        sampling_params=group.sampling_params,
        prompt_token_ids_i32=group.sequences[0].token_ids[:num_prompt_tokens].astype("<i4").tobytes(),
        max_num_tokens=group.max_num_tokens,
        arrival_ns=group.arrival_ns,
        eos_token_id=group.eos_token_id,
        stop_token_ids=group.stop_token_ids,
        priority=group.priority,
        adapter=group.adapter,
        cache_salt=group.cache_salt,
        model_fingerprint=group.model,
        reads_logprobs=reads_logprobs,
        replaces=replaces,
        bad_words=[pb.TokenIds(ids=word) for word in group.bad_words],
        num_bytes=group.num_bytes,
        earlier_life=encode_counters(number, group) if is_moved else None,
    )
    if group.trace is not None:
        message.traceparent, message.tracestate = group.trace.context.traceparent, group.trace.context.state
    finished = SequenceStatus.FINISHED  # an output may have ended without a token: its client says so
    if any(each.num_tokens > num_prompt_tokens or each.status is finished for each in group.sequences):
        for sequence in group.sequences:
            message.resumed.add(
                token_ids_i32=sequence.token_ids[num_prompt_tokens:].astype("<i4").tobytes(),
                is_finished=sequence.status is SequenceStatus.FINISHED,
            )
    return message


def decode_group(message: frontend_pb2.PreparedGroup, vocab_size: int) -> SequenceGroup:
    """The same group again, without an `output`."""
    params = message.sampling_params
    prompt = np.frombuffer(message.prompt_token_ids_i32, "<i4")
    eos_token_id = message.eos_token_id if message.HasField("eos_token_id") else None
    stop_token_ids = frozenset(message.stop_token_ids)
    all_stops = stop_token_ids if eos_token_id is None else stop_token_ids | {eos_token_id}
    group = SequenceGroup(
        message.request_id,
        prompt,
        params,
        max_num_tokens=message.max_num_tokens,
        arrival_ns=message.arrival_ns,
        eos_token_id=eos_token_id,
        stop_token_ids=stop_token_ids,
        num_outputs=num_outputs(params),
        best_of=best_of(params),
        beam_search=new_beam_search(params, len(prompt), message.max_num_tokens, all_stops, vocab_size),
        priority=message.priority,
        tenant=message.tenant,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        model=message.model_fingerprint,
        bad_words=[word.ids for word in message.bad_words],
        resumed_token_ids=[np.frombuffer(each.token_ids_i32, "<i4").tolist() for each in message.resumed],
    )
    group.num_bytes = message.num_bytes
    for sequence, resumed in zip(group.sequences, message.resumed, strict=False):
        if resumed.is_finished:
            sequence.status = SequenceStatus.FINISHED
    if message.HasField("earlier_life"):
        apply_counters(message.earlier_life, group)
        group.is_resumed = group.has_resumed_tokens or group.first_scheduled_ns is not None
        if group.has_resumed_tokens:
            group.first_token_ns = message.arrival_ns  # it was told of elsewhere, and counted there
    return group
