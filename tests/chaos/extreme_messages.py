"""Hypothesis strategies for messages at their extremes, made from their descriptors: a new field is drawn, too."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import strategies as st

from protos import inference_pb2 as pb

_TEXTS = ["", "say|", "a", "\0", "\N{PILE OF POO}", "<|im_start|>", "e\u0301" * 30, "x" * 256, "x" * 257, "x" * 25_601]
_SMALL = [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 20, 21, 128, 129, 191, 192, 255, 256, 257, 399, 400]
_FLOATS = [0.0, -0.0, 1e-45, 0.25, 0.5, 1.0, 1.0000001, 2.0, 2.0000002, -2.0, -2.5, 100.0, 100.1, -100.0, 3.4e38]
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    Field.TYPE_STRING: st.one_of(st.sampled_from(_TEXTS), st.text(max_size=12)),
    Field.TYPE_BYTES: st.one_of(  # of a request, or of none
        st.binary(max_size=32), st.deferred(lambda: generate_requests().map(pb.GenerateRequest.SerializeToString))
    ),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_FLOAT: st.sampled_from([*_FLOATS, math.nan, math.inf, -math.inf]),
    Field.TYPE_UINT32: st.sampled_from([*_SMALL, 2**31, 2**32 - 1]),
    Field.TYPE_UINT64: st.sampled_from([*_SMALL, 2**63, 2**64 - 1]),
    Field.TYPE_INT32: st.sampled_from([*_SMALL, -1, -2, -(2**31), 2**31 - 1]),
    Field.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 9, -1, 2**31 - 1]),
}
_MANY_MESSAGES, _MANY_TEXTS, _MANY_NUMBERS = [16, 50], [16, 17, 100, 257], [16, 17, 100, 1024, 1025, 5000]


def messages(kind: type[Message], max_fields: int = 4) -> st.SearchStrategy[Any]:
    """Messages of a kind with up to so many fields set, each to something that a client may send but rarely does."""
    fields: list[Any] = list(kind.DESCRIPTOR.fields)
    if not fields:
        return st.just(kind())
    chosen = st.lists(st.sampled_from(fields), max_size=max_fields, unique_by=lambda field: field.number)
    return chosen.flatmap(lambda some: st.tuples(*map(_values, some)).map(lambda values: _filled(kind, some, values)))


def generate_requests() -> st.SearchStrategy[pb.GenerateRequest]:
    """Most of them with a prompt that is short and good, so that what else they say is looked at."""
    return st.builds(_merged, st.sampled_from(_BASES), messages(pb.GenerateRequest, 3), messages(pb.SamplingParams, 3))


_SHORT = pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=8))
_BEAMS = pb.SamplingParams(max_tokens=8, use_beam_search=True, best_of=3, temperature=0)
_BASES = [_SHORT, _SHORT, pb.GenerateRequest(prompt="say|", sampling_params=_BEAMS), pb.GenerateRequest()]


def _merged(base: pb.GenerateRequest, request: pb.GenerateRequest, params: pb.SamplingParams) -> pb.GenerateRequest:
    merged = pb.GenerateRequest()
    merged.CopyFrom(base)
    merged.MergeFrom(request)
    merged.sampling_params.MergeFrom(params)
    return merged


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return st.dictionaries(_SCALARS[key.type], _SCALARS[value.type], max_size=4)
    one = messages(field.message_type._concrete_class) if field.message_type is not None else _SCALARS[field.type]
    if not field.is_repeated:
        return one
    few = st.lists(one, max_size=4)
    counts = _MANY_MESSAGES if field.message_type else _MANY_TEXTS if field.type == Field.TYPE_STRING else _MANY_NUMBERS
    return st.one_of(few, few, few, st.builds(lambda value, count: [value] * count, one, st.sampled_from(counts)))


def _filled(kind: type[Message], fields: list[Any], values: tuple[Any, ...]) -> Message:
    message = kind()
    for field, value in zip(fields, values, strict=True):
        target = getattr(message, field.name)
        if isinstance(value, dict):
            target.update(value)
        elif field.is_repeated:
            target.extend(value)
        elif field.message_type is not None:
            target.SetInParent()
            target.CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message
