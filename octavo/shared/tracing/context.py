"""Where a span stands among others: W3C's trace context, read from and written to `traceparent` and `tracestate`."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"  # names of the headers, and of metadata
MAX_STATE_CHARS = 512  # W3C's least that is to be passed on; what is longer is dropped
CONTEXT_BYTES = 24  # see `TraceContext.to_bytes`
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's ids, whether it is recorded, and what vendors pass along with it (`state`)."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """As a header of version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-0{int(self.is_sampled)}"

    def fields(self) -> list[tuple[str, str]]:
        """Headers, or metadata, that bring it to another service."""
        state = [(TRACESTATE, self.state)] if self.state else []
        return [(TRACEPARENT, self.traceparent), *state]

    def child(self) -> TraceContext:
        """A new span's of the same trace."""
        return replace(self, span_id=new_id(64))

    def to_bytes(self) -> bytes:
        """Trace id, then span id; of one that is sampled, without the state."""
        return self.trace_id.to_bytes(16) + self.span_id.to_bytes(8)

    @staticmethod
    def of_bytes(data: bytes) -> TraceContext:
        """Inverse of `to_bytes`."""
        return TraceContext(int.from_bytes(data[:16]), int.from_bytes(data[16:CONTEXT_BYTES]), True)

    @staticmethod
    def new_root(is_sampled: bool = True) -> TraceContext:
        """The first span's of a new trace."""
        return TraceContext(new_id(128), new_id(64), is_sampled)


# Ids have to differ, and are no secrets: to ask the system for each would take 10 us.
_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)


def new_id(num_bits: int) -> int:
    """Random, and not 0, which means that there is none."""
    return _RANDOM.getrandbits(num_bits) or 1


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that a caller sent; None where it sent none that W3C allows."""
    found = _HEADER.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    is_text = len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return TraceContext(trace_id, span_id, bool(int(found[4], 16) & 1), tracestate if is_text else "")


def of_fields(fields: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """The context in headers or metadata, whose names are in lower case. None where there is none."""
    traceparent = tracestate = ""
    for name, value in fields:
        if name == TRACEPARENT:
            traceparent = str(value)
        elif name == TRACESTATE:
            tracestate = str(value)
    return parse(traceparent, tracestate) if traceparent else None
