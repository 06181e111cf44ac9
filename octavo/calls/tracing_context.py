"""The caller's own span, for a request to be a part of its trace: where the program uses OpenTelemetry."""

from __future__ import annotations

import sys
from typing import Any


def current_trace() -> tuple[tuple[str, str], ...]:
    """As metadata; empty where OpenTelemetry is not loaded, or no span is active. Imports nothing."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return (("traceparent", traceparent), *((("tracestate", state),) if state else ()))
