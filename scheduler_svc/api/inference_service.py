"""The `Inference` service: a call is admitted, its request prepared and submitted, and its answers written.

Long texts are tokenised in text processes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from grpc._cython import cygrpc  # the only place that has the error of a failed write

from octavo.shared.tracing import context as tracing
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.api.many_requests import ManyRequests, WayOut
from scheduler_svc.api.model_states import model_states
from scheduler_svc.api.request_trace import RequestTrace
from scheduler_svc.api.status import refusals
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.engine_core import Core
from scheduler_svc.errors import NotReady, RequestRefused, UnknownName
from scheduler_svc.output.mailboxes import Mailbox, Mailboxes
from scheduler_svc.output.prompt_log import PromptLog
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import MAX_REQUEST_ID_CHARS
from scheduler_svc.requests.request_reader import parse, read_head, skim_head
from scheduler_svc.requests.request_text import PreparedText
from scheduler_svc.requests.tenants import Metadata, Tenants

log = structlog.get_logger()

T = TypeVar("T")

SERVICE = "octavo.v1.Inference"
_DONE = object()
_PAUSE_S = 1e-3  # the shortest that an event loop waits
MAX_READ_BYTES = 65_536  # of a request that is read here, on the event loop: well below a millisecond
# Of so much a group is made on the event loop; of more, on a thread.
MAX_TOKENS_AT_ONCE = 2048
MAX_STOP_CHARS_AT_ONCE = 512


class Texts(Protocol):
    """Who reads, checks, renders and tokenises: `TextProcesses`."""

    async def prepare(self, data: bytes) -> PreparedText:
        """`data`: a GenerateRequest. Raises RequestRefused, here and below."""

    async def tokenize(self, data: bytes) -> bytes:
        """From a TokenizeRequest to a TokenizeResponse, both serialised."""

    async def detokenize(self, data: bytes) -> bytes:
        """From a DetokenizeRequest to a DetokenizeResponse, both serialised."""

    def close(self, refusal: RequestRefused) -> None:
        """Whoever waits or comes is refused so."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients: `texts` and `frontend` prepare, `core` runs, `mailboxes` bring what there is to write.

    `admission` bounds what is in preparation; `Generate`, `Tokenize` and `Detokenize` pass it alike. `tenants` says
    whose a call is. `prompts` gets what is asked and answered, where that is to be logged.
    `tracer` says which requests are traced; None: none is.
    """

    def __init__(
        self,
        frontend: Frontend,
        texts: Texts,
        core: Core,
        mailboxes: Mailboxes,
        admission: Admission,
        tenants: Tenants | None = None,
        prompts: PromptLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.is_draining = False
        self._frontend = frontend
        self._texts = texts
        self._core = core
        self._mailboxes = mailboxes
        self._admission = admission
        self._tenants = tenants or Tenants()
        self._prompts = prompts
        self._tracer = tracer
        self._live: set[asyncio.Task[Any]] = set()  # of requests that have been prepared
        self._shared_calls: set[ManyRequests] = set()
        self._is_broken_off = False
        self._catching_up = asyncio.Lock()

    async def Generate(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        """`data`: a GenerateRequest as it came; a refusal is a status, whatever comes later a message."""
        async with refusals(context):
            metadata = context.invocation_metadata()
            trace = (
                None if self._tracer is None else RequestTrace.begin(self._tracer, tracing.of_fields(metadata or ()))
            )
            await self._answer_traced(trace, metadata, data, _OwnCall(self._mailboxes, context))

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Each as `Generate` answers it, with the metadata of this call."""
        async with refusals(context):
            many = ManyRequests(partial(self._answer_one, context.invocation_metadata()), self._mailboxes)
            self._shared_calls.add(many)
            try:
                await many.run(requests, context)
            finally:
                self._shared_calls.discard(many)

    async def _answer_one(self, metadata: Metadata | None, request: pb.GenerateManyRequest, way_out: WayOut) -> None:
        """One of many, which brings its own trace context."""
        trace = None
        if self._tracer is not None:
            trace = RequestTrace.begin(self._tracer, tracing.parse(request.traceparent, request.tracestate))
        await self._answer_traced(trace, metadata, request.request, way_out)

    async def _answer_traced(
        self, trace: RequestTrace | None, metadata: Metadata | None, data: bytes, way_out: WayOut
    ) -> None:
        if trace is None:
            await self._answer(metadata, data, way_out)
            return
        with trace.until_the_end():
            await self._answer(metadata, data, way_out, trace)

    async def _answer(
        self, metadata: Metadata | None, data: bytes, way_out: WayOut, trace: RequestTrace | None = None
    ) -> None:
        """One request, from its bytes to its last message; in a task of its own. Raises RequestRefused."""
        arrival_ns = time.monotonic_ns() if trace is None else trace.arrival_ns
        head = _head(data)
        request_id = head.request_id or f"gen-{uuid.uuid4().hex}"
        shown_id = request_id[:MAX_REQUEST_ID_CHARS]
        structlog.contextvars.bind_contextvars(request_id=shown_id)  # of this task
        logged = nullcontext() if self._prompts is None else self._prompts.asked(data, shown_id, head)
        with logged as exchange:
            group, replaces = await self._prepare(data, head, request_id, metadata, arrival_ns, trace)
            del data  # a stream may live for hours
            if exchange is not None:
                exchange.follow(group)
            await self._run(group, replaces, way_out, trace)

    async def _run(self, group: SequenceGroup, replaces: bool, way_out: WayOut, trace: RequestTrace | None) -> None:
        """From the queue to the last message. Raises RequestRefused."""
        stream: RequestStream = group.output
        way_out.open(stream)
        task = asyncio.current_task()
        assert task is not None
        self._live.add(task)
        try:
            await self._core.submit(group, replaces=replaces)
            if trace is not None:
                trace.admitted()
            await way_out.write_all(stream)
        except RequestRefused:
            raise  # it was never taken
        except BaseException as error:
            self._core.abandon(group)
            if self._is_broken_off:
                raise NotReady("this server is shutting down; another can go on with `resume`") from None
            if isinstance(error, asyncio.CancelledError):
                log.info("client is gone")
            raise
        else:
            self._core.forget(group)
        finally:
            self._live.discard(task)
            way_out.close(stream)

    async def _prepare(
        self,
        data: bytes,
        head: pb.GenerateRequest,
        request_id: str,
        metadata: Metadata | None,
        arrival_ns: int,
        trace: RequestTrace | None = None,
    ) -> tuple[SequenceGroup, bool]:
        """A group, and whether it replaces a live one. Refuses what cannot be taken anyway before any work is done."""
        num_preparing = self._admission.num_requests
        try:
            of_call = self._tenants.of_call(metadata)
            head.tenant = self._tenants.check(of_call, head.tenant)
            with self._admission.admit(len(data)):
                if self.is_draining:
                    raise NotReady("this server is draining")
                await self._core.check_room(head, num_preparing, len(data))
                prepared = await self._tokenized(data, head, trace)
                request = prepared.request
                request.request_id = request.request_id or request_id
                request.tenant = self._tenants.check(of_call, request.tenant)
                request.cache_salt, hides_cached_tokens = self._tenants.prefixes(metadata, request.cache_salt)
                group = await self._new_group(prepared, arrival_ns)
                group.num_bytes, group.hides_cached_tokens = len(data), hides_cached_tokens
                if trace is not None:
                    trace.prepared(group, request)
                if group.output.is_behind:
                    await self._catch_up(group.output)
                return group, request.attempt > 0 or bool(request.resume)
        except RequestRefused as refusal:
            self._core.refused(refusal)
            raise

    async def _tokenized(self, data: bytes, head: pb.GenerateRequest, trace: RequestTrace | None) -> PreparedText:
        if trace is None:
            return await self._with_models(self._texts.prepare, data)
        with trace.tokenizing(head):
            return await self._with_models(self._texts.prepare, data)

    async def _new_group(self, prepared: PreparedText, arrival_ns: int) -> SequenceGroup:
        num_tokens = len(prepared.token_ids) + sum(len(output.token_ids) for output in prepared.request.resume)
        num_stop_chars = sum(map(len, prepared.request.sampling_params.stop))
        if num_tokens <= MAX_TOKENS_AT_ONCE and num_stop_chars <= MAX_STOP_CHARS_AT_ONCE:
            return self._frontend.new_group(prepared, arrival_ns)
        return await asyncio.to_thread(self._frontend.new_group, prepared, arrival_ns)

    def drain(self) -> None:
        """Takes no more, and sends those away who are not queued yet: nothing of theirs is lost."""
        if not self.is_draining:
            self.is_draining = True
            self._texts.close(NotReady("this server is draining"))
            for many in self._shared_calls:
                many.drain()

    async def _catch_up(self, stream: RequestStream) -> None:
        """One piece of one request at a time, and none once its client is gone.

        Between pieces the thread pauses: others of this process would else wait for the interpreter's lock, up to 5 ms
        each time, and every stream's tokens with them.
        """
        pieces = stream.catch_up()
        is_done = False
        while not is_done:
            if self.is_draining:
                raise NotReady("this server is draining")
            async with self._catching_up:
                is_done = next(pieces, _DONE) is _DONE
                await asyncio.sleep(0 if is_done else _PAUSE_S)

    @property
    def is_idle(self) -> bool:
        """Nobody waits for an answer."""
        return not self._live and not self._admission.num_requests

    def break_off(self) -> None:
        """Ends every stream with UNAVAILABLE, so that clients take what they have to another scheduler."""
        self._is_broken_off = True
        for task in self._live:
            task.cancel()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends live requests of this id, of the caller's tenant; `found` is false where there is none."""
        claimed = request.tenant if request.HasField("tenant") else None
        of_call = self._tenants.of_call(context.invocation_metadata())
        tenant = claimed if of_call is None else self._tenants.check(of_call, claimed or "")
        return pb.AbortResponse(found=await self._core.abort(request.request_id, tenant))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        """Of the model named, or of the default one; raises UnknownName."""
        await self._core.catch_up()
        model = self._frontend.model(request.model)
        return pb.ModelInfo(
            model=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            model_hash=model.model_hash,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=model.tokenizer.chat_template is not None,
            adapters=await self._core.adapters(),
            kv_cache_dtype=model.kv_cache_dtype,
            quantization=model.quantization,
            model_fingerprint=model.fingerprint,
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Every model and revision, with how many workers serve it."""
        await self._core.catch_up()
        return pb.ListModelsResponse(models=model_states(self._frontend.models()))

    async def Tokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """`data`: a TokenizeRequest; waits its turn as prompts do."""
        return await self._admitted(self._texts.tokenize, data)

    async def Detokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """`data`: a DetokenizeRequest; waits its turn as prompts do."""
        return await self._admitted(self._texts.detokenize, data)

    async def _admitted(self, answer: Callable[[bytes], Awaitable[bytes]], data: bytes) -> bytes:
        with self._admission.admit(len(data)):
            return await self._with_models(answer, data)

    async def _with_models(self, answer: Callable[[bytes], Awaitable[T]], data: bytes) -> T:
        """Once more where the model has only not been told to this process yet: another one may be ready sooner."""
        models = self._frontend.models()
        try:
            return await answer(data)
        except (NotReady, UnknownName):
            await self._core.catch_up()
            if self._frontend.models() is models:
                raise
            return await answer(data)


def _head(data: bytes) -> pb.GenerateRequest:
    """Id and tenant, for the log and the queue."""
    if len(data) > MAX_READ_BYTES:
        return skim_head(data)
    return parse(read_head, data, f"/{SERVICE}/Generate")


class _OwnCall:
    """A `WayOut`: the call of one request."""

    def __init__(self, mailboxes: Mailboxes, context: grpc.aio.ServicerContext) -> None:
        self._mailboxes = mailboxes
        self._context = context
        self._box: Mailbox | None = None

    def open(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        self._box = self._mailboxes.open(stream)

    async def write_all(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        box, write = self._box, self._context.write
        assert box is not None
        try:
            if (admission := stream.admission()) is not None:
                await write(admission)
            while True:
                response = await box.receive()
                await write(response)
                if response.HasField("usage"):
                    return
        except cygrpc.ExecuteBatchError:  # the client left, or its deadline passed, while this waited to be read
            raise asyncio.CancelledError from None

    def close(self, stream: RequestStream) -> None:
        """See `WayOut`."""
        self._mailboxes.close(stream)


def add_to_server(service: InferenceService, server: grpc.aio.Server) -> None:
    """As the generated function does, but that what takes text comes and goes as bytes: read in a text process."""
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.Generate, response_serializer=pb.GenerateResponse.SerializeToString
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(service.Tokenize),
        "Detokenize": grpc.unary_unary_rpc_method_handler(service.Detokenize),
    }
    # The handler that was added first answers; the generated ones after it are for every other method.
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
