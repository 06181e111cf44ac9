"""Reads `GenerateRequest` bytes so that two prompts are seen: a parsed oneof has silently kept the last of them."""

from __future__ import annotations

from collections.abc import Iterator

from protos import inference_pb2 as pb

_PROMPT_FIELDS = frozenset(field.number for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt_kind"].fields)


def read_generate_request(data: bytes) -> pb.GenerateRequest:
    """The request; one that brought several kinds of prompt comes without any, as no server can know which is meant.

    Raises google.protobuf.message.DecodeError for bytes that are no message.
    """
    request = pb.GenerateRequest.FromString(data)
    if len(_PROMPT_FIELDS.intersection(_field_numbers(data))) > 1:
        request.ClearField("prompt_kind")
    return request


def _field_numbers(data: bytes) -> Iterator[int]:
    """Numbers of the fields on the top level of a valid message (protobuf's wire format)."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        yield tag >> 3
        match tag & 7:
            case 0:  # varint
                _, position = _varint(data, position)
            case 1:  # 64 bits
                position += 8
            case 2:  # length-delimited
                length, position = _varint(data, position)
                position += length
            case 5:  # 32 bits
                position += 4
            case _:
                return  # groups: nothing of ours has them


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number that starts at `position`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if not byte & 0x80:
            return value, position
