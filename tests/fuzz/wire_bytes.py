"""Messages as bytes, made from their descriptors without building them: of any size, good or not.

A message object of a million entries takes seconds to build; its bytes are one entry's, a million times. So sizes here
are capped by nothing but the number that is drawn, and what no library would write (a wrong wire type, text that is not
UTF-8, a field that nobody knows) is as easy as what it would.
"""

from __future__ import annotations

import math
import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

_TEXTS = ["", "say|", "a", "\0", "\N{PILE OF POO}", "<|im_start|>", "<|im_end|>", "e\u0301" * 30, "x" * 257, "{{ 7 }}"]
_FLOATS = [0.0, -0.0, 1e-45, 0.25, 0.5, 1.0, 2.0, -2.0, 100.0, 3.4e38, math.nan, math.inf, -math.inf]
_NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 17, 20, 21, 128, 129, 256, 257, 1023, 1030, 1031, 2047, 2048, 2**31, 2**32 - 1]
_FLOAT_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
MOST_DEEP = 6

Kind = Any  # a Descriptor, of which the types know two


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def entry(number: int, data: bytes) -> bytes:
    """A field of text, bytes or a message."""
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def random_fields(kind: Kind, chance: random.Random, most: int = 4, depth: int = 0) -> bytes:
    """Up to `most` fields of a message, each to something that a client may send but rarely does."""
    fields = list(kind.fields)
    if not fields or depth > MOST_DEEP:
        return b""
    chosen = chance.sample(fields, chance.randint(0, min(most, len(fields))))
    return b"".join(_some(field, chance, depth) for field in chosen)


def blown_up(kind: Kind, chance: random.Random, num_bytes: int) -> bytes:
    """One field of a message, or of a message in it, about so large: a long text, or one small entry many times."""
    fields = [f for f in kind.fields if f.is_repeated or f.message_type or f.type in _TEXT_TYPES]
    if not fields:
        return b""
    field = chance.choice(fields)
    if field.message_type and not field.is_repeated:
        return entry(field.number, blown_up(field.message_type, chance, num_bytes))
    if field.is_repeated:
        return _many(field, chance, num_bytes)
    return entry(field.number, _long_text(chance, num_bytes))


def _many(field: Any, chance: random.Random, num_bytes: int) -> bytes:
    """Entries of a repeated field: very many that are tiny, or some that are long, or one long one among tiny ones."""
    tiny = chance.choice([_one, _empty])(field, chance, 1)
    if not (field.message_type or field.type in _TEXT_TYPES) or chance.random() < 0.3:
        return tiny * max(1, num_bytes // max(1, len(tiny)))
    count = log_uniform(chance, 1, 1000)
    one = _long_of(field, chance, num_bytes // count)
    return one * count if chance.random() < 0.5 else tiny * count + _long_of(field, chance, num_bytes)


def _long_of(field: Any, chance: random.Random, num_bytes: int) -> bytes:
    if field.message_type:
        return entry(field.number, blown_up(field.message_type, chance, num_bytes))
    return entry(field.number, _long_text(chance, num_bytes))


def _long_text(chance: random.Random, num_bytes: int) -> bytes:
    letters = chance.choice(["x", " ", "a b", "\N{PILE OF POO}", "<|im_end|>", "\0", "{%"]).encode()
    return letters * (num_bytes // len(letters))


def mangled(data: bytes, chance: random.Random) -> bytes:
    """A good message with bytes changed, lost or doubled."""
    out = bytearray(data[:65536])
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(4):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 4))
            case _:
                out[at:at] = out[: at // 2]
    return bytes(out)


def log_uniform(chance: random.Random, least: int, most: int) -> int:
    """Small numbers as often as large ones."""
    return int(least * (most / least) ** chance.random())


_TEXT_TYPES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _some(field: Any, chance: random.Random, depth: int) -> bytes:
    if not field.is_repeated:
        return _one(field, chance, depth)
    return b"".join(_one(field, chance, depth) for _ in range(chance.randint(0, 4)))


def _one(field: Any, chance: random.Random, depth: int) -> bytes:
    if field.message_type:
        return entry(field.number, random_fields(field.message_type, chance, 3, depth + 1))
    if field.type in _TEXT_TYPES:
        return entry(field.number, _text(chance))
    if chance.random() < 0.02:  # as no library writes it
        return varint(field.number << 3 | chance.choice([VARINT, FIXED64, FIXED32])) + chance.randbytes(8)
    if field.type in _FLOAT_TYPES:
        is_double = field.type == FieldDescriptor.TYPE_DOUBLE
        number = chance.choice(_FLOATS)
        return varint(field.number << 3 | (FIXED64 if is_double else FIXED32)) + struct.pack(
            "<d" if is_double else "<f", number
        )
    number = chance.choice([*_NUMBERS, -1, -2, chance.getrandbits(64)])
    return varint(field.number << 3 | VARINT) + varint(number)


def _empty(field: Any, chance: random.Random, depth: int) -> bytes:
    """The fewest bytes that one entry of a repeated field can have."""
    if field.message_type or field.type in _TEXT_TYPES:
        return entry(field.number, b"")
    return varint(field.number << 3 | VARINT) + b"\0"


def _text(chance: random.Random) -> bytes:
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randint(1, 12))  # seldom UTF-8
        case 1:
            return "".join(chr(chance.randrange(1, 0xD800)) for _ in range(chance.randint(1, 40))).encode()
        case 2:
            return b"x" * log_uniform(chance, 1, 100_000)
        case _:
            return chance.choice(_TEXTS).encode()
