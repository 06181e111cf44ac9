"""The `Inference` service: decode, call, encode. Tokenising runs in a thread pool, never on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.errors import NotReady
from scheduler_svc.output_processor import Delivery
from scheduler_svc.request_reader import read_generate_request
from scheduler_svc.request_stream import RequestStream
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.serving import Serving
from scheduler_svc.status import refusals

log = structlog.get_logger()

SERVICE = "octavo.v1.Inference"
TOKENIZER_THREADS = 2  # the tokenizers library lets go of the interpreter while it works


class Mailboxes:
    """Messages on their way from the output thread to the coroutines that write them: one wake-up a delivery."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._boxes: dict[RequestStream, asyncio.Queue[pb.GenerateResponse]] = {}

    def open(self, stream: RequestStream) -> asyncio.Queue[pb.GenerateResponse]:
        self._boxes[stream] = asyncio.Queue()
        return self._boxes[stream]

    def close(self, stream: RequestStream) -> None:
        del self._boxes[stream]

    def deliver(self, delivery: Delivery) -> None:
        """Called on the output thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(self._sort, delivery)

    def _sort(self, delivery: Delivery) -> None:
        for stream, response in delivery:
            if (box := self._boxes.get(stream)) is not None:
                box.put_nowait(response)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients from one `Serving`."""

    def __init__(self, serving: Serving, mailboxes: Mailboxes) -> None:
        self.is_draining = False
        self._serving = serving
        self._mailboxes = mailboxes
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        arrival_ns = time.monotonic_ns()
        request.request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        with structlog.contextvars.bound_contextvars(request_id=request.request_id):
            async with refusals(context):
                if self.is_draining:
                    raise NotReady("this server is draining")
                group = await self._in_thread(self._serving.frontend.prepare, request, arrival_ns)
                if request.attempt:
                    await self._replace(group)
                stream: RequestStream = group.output
                box = self._mailboxes.open(stream)
                try:
                    self._serving.engine.submit(group)
                    await self._write_all(stream, box, context)
                except asyncio.CancelledError:
                    log.info("client is gone")
                    raise
                finally:
                    self._mailboxes.close(stream)
                    self._serving.engine.abort_group(group)

    async def _write_all(
        self, stream: RequestStream, box: asyncio.Queue[pb.GenerateResponse], context: grpc.aio.ServicerContext
    ) -> None:
        if (admission := stream.admission()) is not None:
            await context.write(admission)
        while True:
            response = await box.get()
            await context.write(response)
            if response.HasField("usage"):
                return

    async def _replace(self, group: SequenceGroup) -> None:
        """A client that sends a request again wants no answer to the first attempt."""
        self._serving.engine.abort(group.request_id, group.tenant)
        await asyncio.wrap_future(self._serving.engine.call(lambda: None))

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._serving.engine.abort(request.request_id))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        async with refusals(context):
            model = self._serving.frontend.model()
            return pb.ModelInfo(
                model=model.name,
                architecture=model.architecture,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                dtype=model.dtype,
                model_hash=model.model_hash,
                eos_token_ids=model.eos_token_ids,
                has_chat_template=model.tokenizer.chat_template is not None,
            )
        raise AssertionError("refused calls do not come here")

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with refusals(context):
            return await self._in_thread(self._serving.frontend.tokenize, request)
        raise AssertionError("refused calls do not come here")

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with refusals(context):
            return await self._in_thread(self._serving.frontend.detokenize, request)
        raise AssertionError("refused calls do not come here")

    async def _in_thread(self, function, *arguments):  # type: ignore[no-untyped-def]  # passes any function through
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def add_to_server(service: InferenceService, server: grpc.aio.Server) -> None:
    """As the generated function does, with a reader of `Generate` requests that sees two prompts."""
    generate = grpc.unary_stream_rpc_method_handler(
        service.Generate, read_generate_request, pb.GenerateResponse.SerializeToString
    )
    # The handler that was added first answers; the generated ones after it are for every other method.
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})])
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
