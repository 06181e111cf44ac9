"""An Inference service of known answers: token k of output i is a function of the seed, i and k.

It takes up resumed requests as a scheduler does, and can be told to break streams off.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc


def token_at(seed: int, index: int, position: int) -> int:
    return (seed * 31 + index * 17 + position * 7) % 1000


def text_of(token_ids: list[int]) -> str:
    return "".join(f"t{token_id} " for token_id in token_ids)


def expected_tokens(seed: int, index: int, count: int) -> list[int]:
    return [token_at(seed, index, position) for position in range(count)]


Answer = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


class FakeControl(pb_grpc.ControlServicer):
    """Counts how often the prefix cache was flushed; can be watched. `flight_record`: pieces, each with its shard."""

    def __init__(self) -> None:
        self.num_flushes = 0
        self.withheld: list[tuple[str, int]] = []  # that were asked for
        self.flight_record: list[tuple[int, bytes]] = []
        self.view = pb.View(load=pb.Load(num_requests_running=3))
        self.adapters: dict[str, float] = {}  # what was left of the time for loading each, in seconds
        self._steps: queue.SimpleQueue[pb.StepSummary] = queue.SimpleQueue()

    def send_step(self) -> None:
        """For one who watches."""
        self._steps.put(pb.StepSummary(worker="here:1", num_decode_tokens=2))

    def WatchSteps(self, request: pb.WatchStepsRequest, context: grpc.ServicerContext) -> Iterator[pb.StepSummary]:
        while context.is_active():
            with contextlib.suppress(queue.Empty):
                yield self._steps.get(timeout=0.05)

    def WithholdBlocks(
        self, request: pb.WithholdBlocksRequest, context: grpc.ServicerContext
    ) -> pb.WithholdBlocksResponse:
        self.withheld.append((request.worker, request.num_blocks))
        return pb.WithholdBlocksResponse(num_withheld=request.num_blocks)

    def LoadAdapter(
        self, request: pb.ControlLoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.ControlLoadAdapterResponse:
        self.adapters[request.name] = context.time_remaining()
        return pb.ControlLoadAdapterResponse()

    def UnloadAdapter(
        self, request: pb.ControlUnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.ControlUnloadAdapterResponse:
        self.adapters.pop(request.name)
        return pb.ControlUnloadAdapterResponse()

    def GetView(self, request: pb.GetViewRequest, context: grpc.ServicerContext) -> pb.View:
        return self.view

    def DumpFlightRecord(
        self, request: pb.DumpFlightRecordRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FlightRecordPiece]:
        for shard, data in self.flight_record:
            yield pb.FlightRecordPiece(shard=shard, data=data)

    def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: grpc.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        self.num_flushes += 1
        return pb.FlushPrefixCacheResponse()


class FakeInference(pb_grpc.InferenceServicer):
    """`losses`: for each attempt that is to be lost, after how many tokens, and with which status. `cancelled` is set
    when a caller leaves a call before its answer has ended."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.losses: list[tuple[int, grpc.StatusCode]] = []
        self.refusal: tuple[grpc.StatusCode, str, tuple[Any, ...]] | None = None
        self.script: list[pb.GenerateResponse] = []  # when given, the whole answer
        self.answer: Answer | None = None  # likewise, as a function
        self.can_resume = True
        self.max_model_len = 2048
        self.token_delay_s = 0.0
        self.num_lost_texts = 0  # the next so many calls of Detokenize are lost
        self.num_listed = 0
        self.models = [("fake", "aaaa", False), ("fake", "bbbb", True), ("owner/name", "cccc", True)]
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        is_answered, cancelled = False, self.cancelled  # a later test has another event

        def end() -> None:
            if not is_answered and not context.code():  # which nobody set
                cancelled.set()

        context.add_callback(end)
        yield from self._answer(request, context)
        is_answered = True

    def _answer(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusal:
            code, message, trailing = self.refusal
            context.set_trailing_metadata(trailing)
            context.abort(code, message)
        if request.resume and not self.can_resume:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "resume is not built yet")
        if self.script or self.answer:
            yield from self.answer(request, context) if self.answer else self.script
            return
        lost_after, lost_with = self.losses.pop(0) if self.losses else (-1, None)
        sampling = request.sampling_params
        held = {output.index: len(output.token_ids) for output in request.resume}
        yield pb.GenerateResponse(
            admission=pb.Admission(num_prompt_tokens=3), request_id=request.request_id, seed=sampling.seed, model="fake"
        )
        count = sampling.max_tokens or 4
        sent, streams = 0, not request.HasField("stream") or request.stream
        whole = [pb.OutputDelta(index=index) for index in range(max(1, sampling.n))]
        for position in range(count):
            for index in range(max(1, sampling.n)):
                if position < held.get(index, 0):
                    continue
                if sent == lost_after:
                    context.abort(lost_with, "lost on purpose")
                time.sleep(self.token_delay_s)
                token_id = token_at(sampling.seed, index, position)
                delta = pb.OutputDelta(index=index, text=text_of([token_id]), token_ids=[token_id])
                if sampling.HasField("logprobs"):
                    delta.logprobs.add(token=pb.Logprob(token_id=token_id, logprob=-0.5))
                if position == count - 1:
                    delta.finish_reason = pb.FINISH_REASON_LENGTH
                if streams:
                    yield pb.GenerateResponse(outputs=[delta])
                else:
                    text = whole[index].text + delta.text
                    whole[index].MergeFrom(delta)
                    whole[index].text = text
                sent += 1
        if not streams:
            yield pb.GenerateResponse(outputs=whole)
        usage = pb.Usage(prompt_tokens=3, completion_tokens=count * max(1, sampling.n), cached_tokens=1)
        yield pb.GenerateResponse(usage=usage, timings=pb.Timings(queue_ns=5, first_token_ns=6, total_ns=7))

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=request.request_id == "known")

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.ModelInfo:
        return pb.ModelInfo(model="fake", vocab_size=1000, max_model_len=self.max_model_len, has_chat_template=True)

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        self.num_listed += 1
        return pb.ListModelsResponse(
            models=[
                pb.ModelState(name=name, fingerprint=fingerprint, is_current=is_current, max_model_len=2048)
                for name, fingerprint, is_current in self.models
            ]
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        text = request.prompt or "".join(message.content for message in request.messages.messages)
        return pb.TokenizeResponse(token_ids=text.encode())

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        if self.num_lost_texts:
            self.num_lost_texts -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost on purpose")
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())


class FakeServer:
    """A gRPC server around `FakeInference` on a free port, with health; a context manager.

    The system hands that port to nobody once it has stopped: another may take its place there.
    """

    def __init__(self, port: int = 0, tls: tuple[bytes, bytes] | None = None) -> None:  # key, certificate
        self.inference = FakeInference()
        self.control = FakeControl()
        self.health = health.HealthServicer()
        self._server = grpc.server(ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_InferenceServicer_to_server(self.inference, self._server)
        pb_grpc.add_ControlServicer_to_server(self.control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        where = f"127.0.0.1:{port or free_port()}"
        if tls is None:
            self.port = self._server.add_insecure_port(where)
        else:
            self.port = self._server.add_secure_port(where, grpc.ssl_server_credentials([tls]))
        self.address = f"127.0.0.1:{self.port}"
        self.set_ready(True)

    def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self.health.set("octavo.v1.Inference", status)

    def stop(self) -> None:
        self._server.stop(None).wait()

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
