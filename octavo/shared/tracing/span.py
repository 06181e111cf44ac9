"""A span that has ended, as whoever measured it writes it down: plain values, which cost a microsecond."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.shared.tracing.context import TraceContext

Attribute = str | bool | int | float | Sequence[str]
MAX_LINKS = 128  # of a span: OpenTelemetry's own limit


class Kind(enum.Enum):
    """Who is at the other end."""

    INTERNAL = "internal"
    SERVER = "server"  # a caller, whom it answers
    CONSUMER = "consumer"  # whoever put the work into a queue


def own(**values: Attribute) -> dict[str, Attribute]:
    """Attributes that OpenTelemetry's conventions have no name for, in a space of names of their own."""
    return {f"octavo.{name}": value for name, value in values.items()}


@dataclass(slots=True)
class Span:
    """Times are in ns on the monotonic clock. `error`: its kind, where it ended with one.

    No attribute holds what a client wrote or a model answered.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    links: Sequence[TraceContext] = ()
    error: str = ""
    kind: Kind = Kind.INTERNAL
