"""The span of one HTTP request, from its headers to the end of its answer, and what its schedulers are told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from gateway_svc.http.metrics import CLIENT_GONE, FAILED, Told
from octavo.client import Metadata
from octavo.shared.tracing.context import TRACEPARENT, TRACESTATE, of_fields
from octavo.shared.tracing.span import Attribute, Kind, Span
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb

MAX_NAME_CHARS = 256


class ServerTrace:
    """Where the request is not traced, the scheduler is told just that: it decides nothing by itself.

    Args:
        headers: of the request, by their names in lower case.
        path: one of the paths that are served.
    """

    def __init__(self, tracer: Tracer, headers: Iterable[tuple[str, str]], path: str) -> None:
        self._tracer = tracer
        self._parent = of_fields(headers)
        self._context = tracer.begin(self._parent)
        self._path, self._started_ns = path, time.monotonic_ns()
        self._attributes: dict[str, Attribute] = {"http.request.method": "POST", "http.route": path}

    def metadata(self, passed: Metadata) -> Metadata:
        """What goes to schedulers: what is `passed` on, and this span in place of the client's."""
        others = [(name, value) for name, value in passed if name not in (TRACEPARENT, TRACESTATE)]
        return [*others, *self._context.fields()]

    def asked(self, request_id: str, requests: Sequence[pb.GenerateRequest]) -> None:
        """The body was read: a request for each prompt."""
        self._attributes["gen_ai.response.id"] = request_id[:MAX_NAME_CHARS]
        if requests and requests[0].model:
            self._attributes["gen_ai.request.model"] = requests[0].model[:MAX_NAME_CHARS]

    def end(self, told: Told) -> None:
        """Everything is written, or nobody is left to read."""
        if not self._context.is_sampled:
            return
        status = told.status
        self._attributes["http.response.status_code"] = status
        error = "CANCELLED" if status == CLIENT_GONE else str(status) if status >= 400 else ""
        name, now_ns = f"POST {self._path}", time.monotonic_ns()
        self._tracer.emit(
            Span(
                name,
                self._context,
                self._parent,
                self._started_ns,
                now_ns,
                self._attributes,
                error=error,
                kind=Kind.SERVER,
            )
        )


@contextmanager
def ending(trace: ServerTrace | None, told: Told) -> Iterator[None]:
    """The request is answered within."""
    try:
        yield
    except Exception:  # as the metrics have it, which are told later
        told.status = FAILED
        raise
    finally:
        if trace is not None:
            trace.end(told)
