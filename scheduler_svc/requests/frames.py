"""What a text process and the process that started it write to each other: bytes behind their length, nothing pickled.

frame    = u64 length, u8 kind, payload
payload  = parts behind their lengths (`pack`), or the bytes of one message
"""

from __future__ import annotations

import enum
import json
import struct
from array import array
from collections.abc import Iterable, Sequence

from protos import inference_pb2 as pb
from scheduler_svc.errors import FieldViolation, InvalidRequest, RequestRefused, UnknownName, Unsupported
from scheduler_svc.requests.request_text import PreparedText

HEADER = struct.Struct("<QB")
_LENGTH = struct.Struct("<Q")
_REFUSALS = {kind.__name__: kind for kind in (InvalidRequest, Unsupported, UnknownName)}


class Ask(enum.IntEnum):
    """What a text process is asked to do; the payload is a model's files, or a serialised request."""

    LOAD = 0
    PREPARE = 1
    TOKENIZE = 2
    DETOKENIZE = 3


class Answer(enum.IntEnum):
    """What comes back."""

    OK = 0
    REFUSED = 1  # payload: what to raise
    FAILED = 2  # payload: the traceback of a fault of our own


def frame(kind: int, payload: bytes) -> bytes:
    """`kind`: an `Ask` or an `Answer`."""
    return HEADER.pack(len(payload), kind) + payload


def pack(parts: Iterable[bytes]) -> bytes:
    """Each part behind its length; inverse of `unpack`."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(data: bytes) -> list[bytes]:
    """The parts of what `pack` made."""
    parts, position = [], 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        parts.append(data[position : position + length])
        position += length
    return parts


def encode_prepared(prepared: PreparedText) -> bytes:
    """Takes the prompt out of the request."""
    prepared.request.ClearField("prompt_kind")
    return pack(
        [prepared.request.SerializeToString(), *map(_encode_ids, (prepared.token_ids, *prepared.bad_words))],
    )


def decode_prepared(data: bytes) -> PreparedText:
    """Inverse of `encode_prepared`."""
    request, token_ids, *bad_words = unpack(data)
    return PreparedText(
        pb.GenerateRequest.FromString(request), _decode_ids(token_ids), list(map(_decode_ids, bad_words))
    )


def encode_refusal(error: RequestRefused) -> bytes:
    """As JSON: kind, message, the violations of fields, and whether the request is too long."""
    violations = [(each.field, each.description) for each in getattr(error, "violations", ())]
    return json.dumps([type(error).__name__, str(error), violations, getattr(error, "is_too_long", False)]).encode()


def decode_refusal(data: bytes) -> RequestRefused:
    """Inverse of `encode_refusal`, of a kind that is known here."""
    name, message, violations, is_too_long = json.loads(data)
    kind = _REFUSALS[name]
    if kind is not InvalidRequest:
        return kind(message)
    return InvalidRequest(*(FieldViolation(*each) for each in violations), is_too_long=is_too_long)


def _encode_ids(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _decode_ids(data: bytes) -> list[int]:
    token_ids = array("I")
    token_ids.frombytes(data)
    return token_ids.tolist()
