"""HTTP/2 by hand, for what no client library does: calls that are never finished, resets in a row, frames that lie.

RFC 9113 for frames, RFC 7541 for headers (literal ones alone). Sockets come from an address of loopback of their own,
so that whatever is cut off for them is cut off for no other client.
"""

from __future__ import annotations

import random
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SOURCE = "127.0.0.9"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4
TIMEOUT_S = 2.0


def connection(address: str) -> socket.socket:
    """A connection on which HTTP/2 has begun."""
    one = plain_connection(address)
    one.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    return one


def plain_connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S, source_address=(SOURCE, 0))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(stream: int, method: str) -> bytes:
    """The headers of a call, without its message and without an end."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    block = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)
    return frame(HEADERS, END_HEADERS, stream, block)


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", 8))  # CANCEL


def begun_message(stream: int, num_bytes: int) -> bytes:
    """The begin of a message that says to be so long and never comes."""
    return frame(DATA, 0, stream, b"\0" + struct.pack(">I", num_bytes) + b"\x0a")


def message(stream: int, data: bytes) -> bytes:
    """The one message of a call, whole, and with it the end of what the client sends."""
    return frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(data)) + data)


def random_frame(chance: random.Random) -> bytes:
    payload = chance.randbytes(chance.randint(0, 64))
    return frame(chance.randrange(12), chance.getrandbits(8), chance.getrandbits(31), payload)


def _literal(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()
