"""A collector of traces in this process: the real service of OTLP, which keeps the spans that come."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Collected:
    """A span as a test reads it; ids in hexadecimal digits."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    links: list[str]  # span ids
    error: str
    message: trace_pb2.Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """On a free port of loopback, from `with` to the end of its block."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None)

    def Export(self, request, context):
        for resource_spans in request.resource_spans:
            service = {each.key: _value(each.value) for each in resource_spans.resource.attributes}["service.name"]
            for scope_spans in resource_spans.scope_spans:
                self.spans += [_collected(str(service), span) for span in scope_spans.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Collected]:
        """Spans of this name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Collected:
        (span,) = self.named(name)
        return span

    def below(self, parent: Collected) -> list[str]:
        """Names of its children, in the order in which they began."""
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return [span.name for span in sorted(children, key=lambda span: span.start_ns)]

    def wait_for(self, names: str, is_there: Callable[[], bool] = lambda: True) -> None:
        """Until a span of each name has come, and `is_there`."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (set(names.split()) <= {span.name.split()[0] for span in list(self.spans)} and is_there()):
            assert time.monotonic() < deadline, f"only {sorted(span.name for span in self.spans)} came"
            time.sleep(0.02)


def _collected(service: str, span: trace_pb2.Span) -> Collected:
    return Collected(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {each.key: _value(each.value) for each in span.attributes},
        [link.span_id.hex() for link in span.links],
        span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
        span,
    )


def _value(value) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
