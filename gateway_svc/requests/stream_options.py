"""`stream` and `stream_options`: whether an answer comes in parts, and what comes with them."""

from __future__ import annotations

from typing import NamedTuple

from gateway_svc.errors import InvalidField
from gateway_svc.requests.fields import Fields


class Streaming(NamedTuple):
    """Whether an answer comes in parts, and whether its usage comes with them."""

    streams: bool
    includes_usage: bool


def read_streaming(fields: Fields) -> Streaming:
    """Raises InvalidField."""
    streams = bool(fields.switch("stream"))
    options = fields.object("stream_options")
    if options is None:
        return Streaming(streams, False)
    if not streams:
        raise InvalidField(fields.param("stream_options"), "got an object; accepted: only with stream")
    includes_usage = bool(options.switch("include_usage"))
    options.leave("include_obfuscation")  # padding against who counts bytes on an open line
    options.refuse({"continuous_usage_stats": "usage comes once, at the end"})
    options.finish()
    return Streaming(True, includes_usage)
