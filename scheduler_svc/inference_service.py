"""The `Inference` service: decode, call, encode. Tokenising runs in a thread pool, never on the event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from grpc._cython import cygrpc  # the only place that has the error of a failed write

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.core import Core
from scheduler_svc.errors import NotReady, RequestRefused
from scheduler_svc.frontend import MAX_REQUEST_ID_CHARS, Frontend
from scheduler_svc.mailboxes import Mailbox, Mailboxes
from scheduler_svc.request_reader import read_generate_request
from scheduler_svc.request_stream import RequestStream
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.status import refusals

log = structlog.get_logger()

SERVICE = "octavo.v1.Inference"
_DONE = object()
TOKENIZER_THREADS = 2  # the tokenizers library lets go of the interpreter while it works


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients: `frontend` prepares, `core` runs, `mailboxes` bring what there is to write."""

    def __init__(self, frontend: Frontend, core: Core, mailboxes: Mailboxes) -> None:
        self.is_draining = False
        self._frontend = frontend
        self._core = core
        self._mailboxes = mailboxes
        self._num_preparing = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._is_broken_off = False
        self._catching_up = asyncio.Lock()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        arrival_ns = time.monotonic_ns()
        request.request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        with structlog.contextvars.bound_contextvars(request_id=request.request_id[:MAX_REQUEST_ID_CHARS]):
            async with refusals(context):
                group = await self._prepare(request, arrival_ns)
                stream: RequestStream = group.output
                box = self._mailboxes.open(stream)
                call = asyncio.current_task()
                assert call is not None
                self._calls.add(call)
                try:
                    await self._core.submit(group, replaces=request.attempt > 0 or bool(request.resume))
                    await _write_all(stream, box, context)
                except RequestRefused:
                    raise  # it was never taken
                except BaseException:
                    self._core.abandon(group)
                    if self._is_broken_off:
                        raise NotReady("this server is shutting down; another can go on with `resume`") from None
                    log.info("client is gone")
                    raise
                else:
                    self._core.forget(group)
                finally:
                    self._calls.discard(call)
                    self._mailboxes.close(stream)

    async def _prepare(self, request: pb.GenerateRequest, arrival_ns: int) -> SequenceGroup:
        """Refuses what cannot be taken anyway before any work is put into it."""
        num_preparing = self._num_preparing
        self._num_preparing += 1
        try:
            if self.is_draining:
                raise NotReady("this server is draining")
            await self._core.check_room(request, num_preparing)
            group = await self._in_thread(self._frontend.prepare, request, arrival_ns)
            if group.output.is_behind:
                await self._catch_up(group.output)
            return group
        except RequestRefused as refusal:
            self._core.refused(refusal)
            raise
        finally:
            self._num_preparing -= 1

    async def _catch_up(self, stream: RequestStream) -> None:
        """One piece of one request at a time, between the turns of all others, and none once its client is gone."""
        pieces = stream.catch_up()
        is_done = False
        while not is_done:
            async with self._catching_up:
                is_done = next(pieces, _DONE) is _DONE
                await asyncio.sleep(0)

    @property
    def is_idle(self) -> bool:
        """Nobody waits for an answer."""
        return not self._calls and not self._num_preparing

    def break_off(self) -> None:
        """Ends every stream with UNAVAILABLE, so that clients take what they have to another scheduler."""
        self._is_broken_off = True
        for call in self._calls:
            call.cancel()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=await self._core.abort(request.request_id))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        model = self._frontend.model()
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
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        return await self._in_thread(self._frontend.tokenize, request)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        return await self._in_thread(self._frontend.detokenize, request)

    async def _in_thread(self, function, *arguments):  # type: ignore[no-untyped-def]  # passes any function through
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


async def _write_all(stream: RequestStream, box: Mailbox, context: grpc.aio.ServicerContext) -> None:
    try:
        if (admission := stream.admission()) is not None:
            await context.write(admission)
        while True:
            response = await box.receive()
            await context.write(response)
            if response.HasField("usage"):
                return
    except cygrpc.ExecuteBatchError:  # the client left, or its deadline passed, while this waited to be read
        raise asyncio.CancelledError from None


def add_to_server(service: InferenceService, server: grpc.aio.Server) -> None:
    """As the generated function does, with a reader of `Generate` requests that sees two prompts."""
    generate = grpc.unary_stream_rpc_method_handler(
        service.Generate, read_generate_request, pb.GenerateResponse.SerializeToString
    )
    # The handler that was added first answers; the generated ones after it are for every other method.
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})])
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
