"""The span of one request that is traced, from its first byte here to its last message, and those of its admission.

Names are those of OpenTelemetry's conventions for generative AI; what these do not know begins with `octavo.`. No
attribute holds what a client wrote or a model answered, but for names: of the request, of models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from octavo.shared.tracing.context import TraceContext
from octavo.shared.tracing.span import Attribute, Kind, Span, own
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb
from scheduler_svc.api.status import STATUS_CODES
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import RequestRefused
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.tracing.group_trace import GroupTrace

MAX_NAME_CHARS = 256  # of what a client has named something
CANCELLED, INTERNAL, FAILED = "CANCELLED", "INTERNAL", "generation_failed"  # kinds of errors
_PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}


class RequestTrace:
    """For one event loop. Times are taken here; spans leave when they end."""

    def __init__(self, tracer: Tracer, context: TraceContext, parent: TraceContext | None) -> None:
        self.arrival_ns = time.monotonic_ns()
        self._tracer = tracer
        self._context, self._parent = context, parent
        self._admission = context.child()
        self._is_admitted = False
        self._stream: RequestStream | None = None
        self._operation, self._model = "text_completion", ""
        self._attributes: dict[str, Attribute] = {"gen_ai.provider.name": "octavo"}

    @staticmethod
    def begin(tracer: Tracer, parent: TraceContext | None) -> RequestTrace | None:
        """None where the request is not to be traced. `parent`: the caller's span, if it named one."""
        context = tracer.begin(parent)
        return RequestTrace(tracer, context, parent) if context.is_sampled else None

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """The request is answered within; whatever is raised there ends it with an error."""
        structlog.contextvars.bind_contextvars(trace_id=f"{self._context.trace_id:032x}")  # of this task
        error = INTERNAL
        try:
            yield
            error = ""
        except asyncio.CancelledError:
            error = CANCELLED
            raise
        except RequestRefused as refusal:
            error = STATUS_CODES[type(refusal)].name
            raise
        finally:
            self._end(error)

    @contextmanager
    def tokenizing(self, head: pb.GenerateRequest) -> Iterator[None]:
        """Within, the request is read, checked, rendered and tokenised, here or in a text process."""
        self._name(head.request_id, head.model)
        started_ns, error = time.monotonic_ns(), INTERNAL
        try:
            yield
            error = ""
        except RequestRefused as refusal:
            error = STATUS_CODES[type(refusal)].name
            raise
        finally:
            context = self._context.child()
            self._emit(Span("tokenize", context, self._admission, started_ns, time.monotonic_ns(), error=error))

    def prepared(self, group: SequenceGroup, request: pb.GenerateRequest) -> None:
        """The request as it will run: whoever has the group makes spans of that below this one."""
        if request.WhichOneof("prompt_kind") == "messages":
            self._operation = "chat"
        self._stream = group.output
        self._name(group.request_id, request.model)
        params = request.sampling_params
        for name, attribute in _PARAMETERS.items():
            if params.HasField(name):
                self._attributes[attribute] = round(getattr(params, name), 6)  # on the wire it has 32 bits
        if request.adapter:
            self._attributes |= own(adapter=request.adapter[:MAX_NAME_CHARS])
        if request.attempt:
            self._attributes |= own(attempt=request.attempt)
        self._attributes["gen_ai.usage.input_tokens"] = group.num_prompt_tokens
        group.trace = GroupTrace(self._context, self._tracer.emit)

    def admitted(self) -> None:
        """It was taken, and waits for its first step."""
        self._end_admission()

    def _name(self, request_id: str, model: str) -> None:
        self._model = model[:MAX_NAME_CHARS] or self._model
        if request_id:
            self._attributes["gen_ai.response.id"] = request_id[:MAX_NAME_CHARS]

    def _end_admission(self, error: str = "") -> None:
        if not self._is_admitted:
            self._is_admitted = True
            now_ns = time.monotonic_ns()
            self._emit(Span("admission", self._admission, self._context, self.arrival_ns, now_ns, error=error))

    def _end(self, error: str) -> None:
        self._end_admission(error)
        now_ns = time.monotonic_ns()
        attributes = self._attributes
        if self._stream is not None:
            reasons = self._stream.finish_reasons()
            self._describe(self._stream, reasons, now_ns)
            if FinishReason.ERROR in reasons:
                error = error or FAILED
        attributes["gen_ai.operation.name"] = self._operation
        if self._model:
            attributes["gen_ai.request.model"] = self._model
        name = f"{self._operation} {self._model}".rstrip()
        self._emit(
            Span(name, self._context, self._parent, self.arrival_ns, now_ns, attributes, error=error, kind=Kind.SERVER)
        )

    def _describe(self, stream: RequestStream, reasons: list[FinishReason], now_ns: int) -> None:
        group, attributes = stream.group, self._attributes
        attributes["gen_ai.response.model"] = self._model = self._model or stream.model
        attributes["gen_ai.response.finish_reasons"] = [reason.name.lower() for reason in reasons]
        attributes["gen_ai.usage.output_tokens"] = stream.num_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = group.num_cached_tokens
        attributes["gen_ai.latency.e2e"] = (now_ns - group.arrival_ns) / 1e9
        if group.first_scheduled_ns is not None:
            attributes["gen_ai.latency.time_in_queue"] = (group.first_scheduled_ns - group.arrival_ns) / 1e9
        if stream.first_token_ns is not None:
            attributes["gen_ai.latency.time_to_first_token"] = (stream.first_token_ns - group.arrival_ns) / 1e9
        if group.num_preemptions:
            attributes |= own(num_preemptions=group.num_preemptions)
        if group.num_moves:
            attributes |= own(num_moves=group.num_moves)

    def _emit(self, span: Span) -> None:
        self._tracer.emit(span)
