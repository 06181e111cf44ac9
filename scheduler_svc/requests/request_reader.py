"""Requests from their bytes: bytes that are no message are refused, and two prompts in one request are noticed.

A parsed oneof silently keeps the last of two prompts. So the bytes are also read as a `RequestHead`: a
`GenerateRequest` whose prompts are plain fields, unread. That runs in C, and takes a few milliseconds and little memory
for the largest request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from protos import inference_pb2 as pb
from scheduler_svc.errors import FieldViolation, InvalidRequest

M = TypeVar("M")

_GENERATE = pb.GenerateRequest.DESCRIPTOR
_PROMPT_FIELDS = tuple(field.name for field in _GENERATE.oneofs_by_name["prompt_kind"].fields)
_HEAD_FIELDS = ("request_id", "tenant")
_HEAD_NUMBERS = frozenset(_GENERATE.fields_by_name[name].number for name in _HEAD_FIELDS)
_VARINT, _LENGTH, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}  # wire types, and what the others take
MAX_SKIMMED_FIELDS = 256  # some 0.2 ms; a request has fewer, with one for each output that it resumes
MAX_SKIMMED_BYTES = 4096  # of an id or a tenant; those that are accepted are shorter


def parse(deserialize: Callable[[bytes], M], data: bytes, method: str) -> M:
    """Raises InvalidRequest for bytes that are no message."""
    try:
        return deserialize(data)
    except DecodeError as error:
        what = f"these {len(data)} bytes are no request of {method}: {error}"
        raise InvalidRequest(FieldViolation("request", what)) from None


def read_generate_request(data: bytes) -> pb.GenerateRequest:
    """The request; one that brought several kinds of prompt comes without any, as no server can know which is meant.

    Raises google.protobuf.message.DecodeError for bytes that are no message.
    """
    request = pb.GenerateRequest.FromString(data)
    head = _RequestHead.FromString(data)
    if sum(map(head.HasField, _PROMPT_FIELDS)) > 1:
        request.ClearField("prompt_kind")
    return request


def read_head(data: bytes) -> pb.GenerateRequest:
    """What a queue is asked about: the request's id and tenant. Raises DecodeError."""
    head = _RequestHead.FromString(data)
    return pb.GenerateRequest(**{name: getattr(head, name) for name in _HEAD_FIELDS})


def skim_head(data: bytes) -> pb.GenerateRequest:
    """As `read_head`, and as fast for a large request: what is in its other fields is passed over.

    Empty where that cannot be told, as of bytes that are no message.
    """
    places: dict[int, slice] = {}  # by field; of several the last counts
    position = 0
    try:
        for _ in range(MAX_SKIMMED_FIELDS):
            if position == len(data):
                return read_head(b"".join(data[place] for place in places.values()))
            begin = position
            key, position = _read_varint(data, begin)
            number, wire_type = key >> 3, key & 7
            if wire_type == _LENGTH:
                num_bytes, position = _read_varint(data, position)
                position += num_bytes
            elif wire_type == _VARINT:
                _, position = _read_varint(data, position)
            else:
                position += _FIXED_BYTES[wire_type]
            if number in _HEAD_NUMBERS and position - begin <= MAX_SKIMMED_BYTES:
                places[number] = slice(begin, position)
    except (IndexError, KeyError, DecodeError):
        pass  # whoever reads all of it says what is wrong
    return pb.GenerateRequest()


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends. Raises IndexError where it does not."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a number of more than ten bytes")


def _head_class() -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto(name="octavo/request_head.proto", package="octavo.v1", syntax="proto3")
    message = file.message_type.add(name="GenerateRequest")
    for name in _HEAD_FIELDS:
        _add(message, name, descriptor_pb2.FieldDescriptorProto.TYPE_STRING)
    for name in _PROMPT_FIELDS:  # optional: in a oneof of its own
        field = _add(message, name, descriptor_pb2.FieldDescriptorProto.TYPE_BYTES)
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    pool = descriptor_pool.DescriptorPool()  # of its own, in which it has the name that clients know
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("octavo.v1.GenerateRequest"))


def _add(
    message: descriptor_pb2.DescriptorProto, name: str, kind: descriptor_pb2.FieldDescriptorProto.Type.ValueType
) -> descriptor_pb2.FieldDescriptorProto:
    field: descriptor_pb2.FieldDescriptorProto = message.field.add(
        name=name,
        number=_GENERATE.fields_by_name[name].number,
        type=kind,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    )
    return field


_RequestHead = _head_class()
