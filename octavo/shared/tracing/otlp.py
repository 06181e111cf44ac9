"""Spans to a collector, over OTLP and gRPC, with OpenTelemetry's own SDK and exporter.

The exporter and the resource read OpenTelemetry's variables (`OTEL_EXPORTER_OTLP_*` for headers, timeout, compression
and certificates, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`). The SDK's tracer is not used: its spans are made
where the work is done, 25 us each with its locks, and take no ids and times from elsewhere.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from octavo.shared.tracing.context import TraceContext
from octavo.shared.tracing.span import Kind, Span
from octavo.shared.version import installed_version

_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CONSUMER: SpanKind.CONSUMER}
_LOOKS = 5
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """An `Exporter`. `endpoint`: http://HOST:PORT in plain text, https://HOST:PORT over TLS."""

    def __init__(self, service: str, endpoint: str) -> None:
        self._said = _LastLine()
        library = logging.getLogger("opentelemetry")  # which has a line for each attempt: `Tracer` says it once
        library.propagate, library.handlers = False, [self._said]
        endpoint = endpoint.replace("grpc://", "http://", 1)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        own: dict[str, Any] = {
            "service.name": service,
            "service.version": installed_version(),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        self._resource = Resource.create(own | dict(OTELResourceDetector().detect().attributes))
        self._scope = InstrumentationScope("octavo", installed_version())

    def export(self, spans: Sequence[Span]) -> str:
        """See `Exporter`; repeats for as long as OTEL_EXPORTER_OTLP_TIMEOUT says, 10 s by default."""
        offset_ns = wall_offset_ns()
        self._said.text = ""
        result = self._exporter.export([self._readable(span, offset_ns) for span in spans])
        return "" if result is SpanExportResult.SUCCESS else self._said.text or "the collector took nothing"

    def close(self) -> None:
        """See `Exporter`."""
        self._exporter.shutdown(timeout_millis=0)

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error) if span.error else Status()
        attributes: dict[str, Any] = dict(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        return ReadableSpan(
            span.name,
            _span_context(span.context),
            None if span.parent is None else _span_context(span.parent, is_remote=span.kind is Kind.SERVER),
            self._resource,
            attributes,
            links=[Link(_span_context(link)) for link in span.links],
            kind=_KINDS[span.kind],
            status=status,
            start_time=span.start_ns + offset_ns,
            end_time=span.end_ns + offset_ns,
            instrumentation_scope=self._scope,
        )


def _span_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(context.trace_id, context.span_id, is_remote, _SAMPLED, state)


class _LastLine(logging.Handler):
    """What the library said last."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


def wall_offset_ns() -> int:
    """What the wall clock is ahead of the monotonic one. Of several looks the one that was interrupted least."""
    looks = []
    for _ in range(_LOOKS):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        looks.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(looks)[1]
