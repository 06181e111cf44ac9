"""Clients of a remote Octavo: `AsyncClient` and `Client`, the same calls with and without asyncio.

A stream that breaks is taken up again by itself: the client draws the seed, keeps the tokens it was given and sends
the request with both to whatever scheduler answers next, so that the caller sees a pause and no more. `RetryPolicy`
(octavo.retrying) says for how long. Leaving the iterator of `generate` early cancels the request. Every failed call
raises `octavo.errors.RequestFailed`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from octavo.calls.addresses import (
    Server,
    Servers,
    ServersOfLoop,
    check_key,
    check_may_send_key,
    check_metadata,
    first_failure,
)
from octavo.calls.generation import Generation, build_messages, build_request, repeatable
from octavo.calls.interruptible_stream import InterruptibleStream
from octavo.calls.lingering_call import LingeringCall
from octavo.calls.shared_calls import NotKnown, SharedCalls
from octavo.calls.tracing_context import current_trace
from octavo.errors import RequestFailed
from octavo.outputs import RequestOutput
from octavo.retrying import RetryPolicy
from octavo.sampling_params import SamplingParams
from octavo.shared.access.tls import client_credentials
from protos import inference_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50051"

_UNARY_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 3.0
_ENDLESS_S = 1e9  # and more: 32 years
_READINESS = "octavo.v1.Inference"
Method = Callable[[Server], Any]  # of a scheduler's stubs
Metadata = Sequence[tuple[str, str]]
_ENDED_EARLY = "the stream ended before the request did"


def channel_credentials(
    ca_file: str | Path | None = None, cert_file: str | Path | None = None, key_file: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Credentials for TLS from PEM files: authorities to trust (None: the system's), the client's own certificate.

    Raises ValueError for files that cannot be read or are empty, and for a certificate without its key.
    """
    return client_credentials(*(Path(name) if name else None for name in (ca_file, cert_file, key_file)))


class _Call:
    """What both clients know about one `generate` call: its state over attempts, and its deadline."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        policy: RetryPolicy,
        timeout: float | None,
        num_addresses: int = 1,
        *,
        lingers: bool = False,
    ) -> None:
        self.lingers = lingers
        self.generation = Generation(request, policy, time.monotonic_ns(), num_addresses)
        timeout = _finite(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._last_loss: RequestFailed | None = None

    def remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def receive(self, response: pb.GenerateResponse) -> RequestOutput | None:
        return self.generation.receive(response, time.monotonic_ns())

    def pause_after(self, failure: RequestFailed) -> float:
        """Seconds to wait before the next attempt; raises when there is to be none, or no time is left for it."""
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and self._last_loss is not None:
            raise RequestFailed(failure.code, f"no time for another attempt after: {self._last_loss}")
        delay_s = self.generation.retry_delay_s(failure, time.monotonic_ns(), self.remaining_s())
        self._last_loss = failure
        return delay_s


class _Settings:
    """What both clients are made of, apart from the kind of channel."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None,
        retry: RetryPolicy | None,
        *,
        is_encrypted: bool,
    ) -> None:
        if api_key:
            check_key(api_key)
            check_may_send_key(address, is_encrypted=is_encrypted)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retry = retry or RetryPolicy()

    def _with(self, metadata: Metadata) -> Metadata:
        """What goes with a call beside these. Raises ValueError for what gRPC does not send."""
        check_metadata(metadata)
        return (*self._metadata, *metadata)


class AsyncClient(_Settings):
    """Calls a scheduler from an event loop. Use as an async context manager, or `await close()`. It may be made before
    the loop runs, and is for one loop at a time.

    `address` is HOST:PORT or any other gRPC target, or several, in a list or with commas between them: the first is
    used as long as it answers, then the next. `credentials` (see `channel_credentials`) switch TLS on; without them
    `api_key` is sent to this machine alone, unless `plaintext_key` says that the network is to be trusted. `retry`
    says how long to wait for a lost scheduler, two minutes by default, and is called when that begins. Clients of one
    process and address share a connection, over which a scheduler takes 1,024 calls at once; with `own_connection`
    this one has its own. With `share_calls` streams of this client go over one call (`GenerateMany`): for who has
    hundreds of them open; each costs less CPU time.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        plaintext_key: bool = False,
        retry: RetryPolicy | None = None,
        own_connection: bool = False,
        share_calls: bool = False,
    ) -> None:
        super().__init__(address, api_key, retry, is_encrypted=plaintext_key or credentials is not None)
        self._shared_calls = SharedCalls() if share_calls else None
        self._open: set[Any] = set()  # streams that are read
        channels = grpc.aio.insecure_channel, grpc.aio.secure_channel
        self._servers = ServersOfLoop(address, credentials, *channels, own_connection=own_connection)

    async def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams what the model writes; each item brings what is new, the last one has `finished` set.

        Options are `prompt_token_ids` or `messages` in place of `prompt`, `request_id`, `stream`, `priority`,
        `adapter`, `model`, `tenant`, `cache_salt`, `is_answer`, `add_special_tokens`, `truncate_prompt_tokens`,
        `return_prompt_token_ids`, `add_generation_prompt`, `continue_final_message`, with the defaults of
        `GenerateRequest`. `timeout` is in seconds, over all attempts. `traceparent` names the span that the request is
        a part of, as W3C writes it; by default the caller's current one, where the program uses OpenTelemetry.
        """
        metadata = self._with(_trace(traceparent))
        call = _Call(build_request(prompt, sampling_params, **options), self._retry, timeout, len(self._servers))
        async with aclosing(self._messages(call, metadata)) as messages:
            async for response in messages:
                if output := call.generation.output_of(response):
                    yield output

    def stream(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """`generate` in the words of the wire, for who passes them on: messages as they come, nothing made of them.

        `request` is the call's from now on, and gets an id and a seed where it has none. Each attempt begins with an
        admission; what comes whole is in the last message. `metadata` are sent beside those of the client. A call
        of its own ends half a second after it began at the earliest: a scheduler cuts connections on which many end
        sooner.
        """
        call = _Call(repeatable(request), self._retry, timeout, len(self._servers), lingers=True)
        return self._messages(call, self._with(metadata))

    async def _messages(self, call: _Call, metadata: Metadata) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Over as many attempts as it takes."""
        failure: RequestFailed | None = None
        try:
            while not call.generation.finished:
                server = self._servers.current
                stream = self._start(call, server, metadata)
                self._open.add(stream)
                try:
                    async for response in stream:
                        yield call.generation.take(response, time.monotonic_ns())
                    failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, _ENDED_EARLY)
                except RequestFailed as error:
                    failure = error.with_traceback(None)  # which would hold this generator
                except grpc.RpcError as error:
                    failure = RequestFailed.from_rpc_error(error.with_traceback(None))
                except NotKnown:
                    continue
                except asyncio.CancelledError:  # which `close` has as its effect, too
                    task = asyncio.current_task()
                    if not self._servers.is_closed or (task is not None and task.cancelling()):
                        raise
                    failure = RequestFailed(grpc.StatusCode.CANCELLED, "the client was closed")
                finally:
                    self._open.discard(stream)
                    stream.cancel()
                if not call.generation.finished:
                    if self._servers.is_closed:
                        raise failure
                    try:
                        delay_s = call.pause_after(failure)
                    except RequestFailed as error:
                        raise error.with_traceback(None) from None  # likewise
                    self._servers.failed(server)
                    await asyncio.sleep(delay_s)
                    if self._servers.is_closed:  # meanwhile
                        raise failure
        finally:
            del call, failure  # which what is raised would hold by this frame, and be held by

    def _start(self, call: _Call, server: Server, metadata: Metadata) -> Any:
        """The messages of one attempt, over a call that others share where that can be."""
        request, timeout_s, shared = call.generation.request, call.remaining_s(), None
        if self._shared_calls is not None and timeout_s is None:
            shared = self._shared_calls.start(server, request, metadata)
        if shared is not None:
            return shared
        own = server.inference.Generate(request, timeout=timeout_s, metadata=metadata)
        return LingeringCall(own) if call.lingers else own

    async def complete(
        self, prompt: str | None = None, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """`generate` in one piece: the whole output, when it is finished."""
        async for output in self.generate(prompt, sampling_params, stream=False, **options):
            if output.finished:
                return output
        raise RequestFailed(grpc.StatusCode.INTERNAL, _ENDED_EARLY)

    async def abort(self, request_id: str) -> bool:
        """Ends a request of any client; False when there is none of that id."""
        answers = await self._everywhere(lambda at: at.inference.Abort, pb.AbortRequest(request_id=request_id))
        return any(answer.found for answer in answers)

    async def is_ready(self) -> bool:
        """Whether any scheduler serves, by its own account (grpc.health.v1)."""
        request = health_pb2.HealthCheckRequest(service=_READINESS)
        for server in self._servers.in_turn():
            with suppress(grpc.RpcError):
                answer = await server.health.Check(request, timeout=_HEALTH_TIMEOUT_S, metadata=self._metadata)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
        return False

    async def list_models(self) -> list[pb.ModelState]:
        """Every model that requests may name now, and what a request without a name gets (`is_default`)."""
        return list((await self.call(lambda at: at.inference.ListModels, pb.ListModelsRequest())).models)

    async def model_info(self, model: str = "") -> pb.ModelInfo:
        """Name, architecture, vocabulary and lengths of a model, or of the default one."""
        info: pb.ModelInfo = await self.call(lambda at: at.inference.GetModelInfo, pb.GetModelInfoRequest(model=model))
        return info

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool = True, *, model: str = ""
    ) -> list[int]:
        """Token ids of a text, or of a conversation rendered with the model's chat template."""
        request = _tokenize_request(prompt, add_special_tokens, model)
        return list((await self.call(lambda at: at.inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False, *, model: str = "") -> str:
        """The text of these ids, by the server's tokenizer."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response: pb.DetokenizeResponse = await self.call(lambda at: at.inference.Detokenize, request)
        return response.text

    async def flush_prefix_cache(self) -> int:
        """Lets every worker forget what prompts it has computed; how many cache blocks could be found before."""
        answers = await self._everywhere(lambda at: at.control.FlushPrefixCache, pb.FlushPrefixCacheRequest())
        return sum(answer.num_blocks_flushed for answer in answers)

    async def load_adapter(self, name: str, path: str, timeout: float | None = None, *, metadata: Metadata = ()) -> int:
        """Loads an adapter from where the workers see it; `generate` may name it as soon as this returns.

        Loading again what is there from the same path changes nothing. Returns its generation: what is loaded under a
        name later is another one. `metadata` are sent beside those of the client.
        """
        request = pb.ControlLoadAdapterRequest(name=name, path=path)
        answers: list[pb.ControlLoadAdapterResponse] = await self._everywhere(
            lambda at: at.control.LoadAdapter, request, timeout, metadata
        )
        return answers[0].generation

    async def unload_adapter(self, name: str, timeout: float | None = None, *, metadata: Metadata = ()) -> None:
        """Unloads an adapter. New requests may not name it at once; this returns when those before have ended."""
        request = pb.ControlUnloadAdapterRequest(name=name)
        await self._everywhere(lambda at: at.control.UnloadAdapter, request, timeout, metadata)

    async def call(self, method: Method, request: Message, *, metadata: Metadata = ()) -> Any:
        """The answer of the first scheduler that is there, in the words of the wire: `stream` for other methods."""
        failures: list[RequestFailed] = []
        for server in self._servers.in_turn():
            try:
                sent = self._with(metadata)
                return await method(server)(request, timeout=_UNARY_TIMEOUT_S, metadata=sent)
            except grpc.RpcError as error:
                failures.append(RequestFailed.from_rpc_error(error))
            if self._servers.is_closed or not failures[-1].is_unanswered:
                break
            self._servers.failed(server)
        raise failures[-1]

    async def follow(self, method: Method, request: Message, *, metadata: Metadata = ()) -> AsyncGenerator[Any, None]:
        """What comes of a stream without an end, from the scheduler in use; where it breaks off, this raises."""
        server = self._servers.current
        stream = LingeringCall(method(server)(request, metadata=self._with(metadata)))
        try:
            async for message in stream:
                yield message
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, _ENDED_EARLY)
        except grpc.RpcError as error:
            self._servers.failed(server)
            raise RequestFailed.from_rpc_error(error) from None
        finally:
            stream.cancel()

    async def _everywhere(
        self, method: Method, request: Message, timeout: float | None = _UNARY_TIMEOUT_S, metadata: Metadata = ()
    ) -> list[Any]:
        """The answers of all schedulers that are there; any that refuses is what this raises, or that none is."""
        answers, failures = [], []
        for server in self._servers.in_turn():
            try:
                sent = self._with(metadata)
                answers.append(await method(server)(request, timeout=_finite(timeout), metadata=sent))
            except grpc.RpcError as error:
                failures.append(RequestFailed.from_rpc_error(error))
        if (failure := first_failure(failures, len(self._servers))) is not None:
            raise failure
        return answers

    async def close(self) -> None:
        """Closes all connections; calls that are open end with an error."""
        self._servers.is_closed = True
        if self._shared_calls is not None:
            await self._shared_calls.close()
        for stream in list(self._open):  # which gRPC does not end with its channel
            stream.cancel()
        await self._servers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Client(_Settings):
    """`AsyncClient` for plain threads: the same arguments but `own_connection` and `share_calls`, and methods that
    block. Safe to share between threads.

    >>> with Client("127.0.0.1:50051") as client:
    ...     deltas = list(client.generate("The sea is", SamplingParams(max_tokens=3)))
    >>> [delta.finished for delta in deltas]
    [False, False, False, True]
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        plaintext_key: bool = False,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(address, api_key, retry, is_encrypted=plaintext_key or credentials is not None)
        self._servers = Servers(address, credentials, grpc.insecure_channel, grpc.secure_channel)

    def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """See `AsyncClient.generate`."""
        metadata = self._with(_trace(traceparent))
        call = _Call(build_request(prompt, sampling_params, **options), self._retry, timeout, len(self._servers))
        while not call.generation.finished:
            server = self._servers.current
            stream = self._start(call, server, metadata)
            try:
                for response in stream:
                    if output := call.receive(response):
                        yield output
                failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, _ENDED_EARLY)
            except RequestFailed as error:
                failure = error.with_traceback(None)  # which would hold this generator
            finally:
                stream.cancel()
            if not call.generation.finished:
                if self._servers.is_closed:
                    raise failure
                delay_s = call.pause_after(failure)
                self._servers.failed(server)
                time.sleep(delay_s)
                if self._servers.is_closed:  # meanwhile
                    raise failure

    def _start(self, call: _Call, server: Server, metadata: Metadata) -> InterruptibleStream[pb.GenerateResponse]:
        def start() -> Any:
            request = call.generation.request
            return server.inference.Generate(request, timeout=call.remaining_s(), metadata=metadata)

        return InterruptibleStream(start)

    def complete(
        self, prompt: str | None = None, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """`generate` in one piece: the whole output, when it is finished."""
        for output in self.generate(prompt, sampling_params, stream=False, **options):
            if output.finished:
                return output
        raise RequestFailed(grpc.StatusCode.INTERNAL, _ENDED_EARLY)

    def abort(self, request_id: str) -> bool:
        """Ends a request of any client, on any server; False when there is none of that id."""
        answers = self._everywhere(lambda at: at.inference.Abort, pb.AbortRequest(request_id=request_id))
        return any(answer.found for answer in answers)

    def list_models(self) -> list[pb.ModelState]:
        """See `AsyncClient.list_models`."""
        return list(self._unary(lambda at: at.inference.ListModels, pb.ListModelsRequest()).models)

    def model_info(self, model: str = "") -> pb.ModelInfo:
        """See `AsyncClient.model_info`."""
        info: pb.ModelInfo = self._unary(lambda at: at.inference.GetModelInfo, pb.GetModelInfoRequest(model=model))
        return info

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool = True, *, model: str = ""
    ) -> list[int]:
        """Token ids of a text, or of a conversation rendered with the model's chat template."""
        request = _tokenize_request(prompt, add_special_tokens, model)
        return list(self._unary(lambda at: at.inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False, *, model: str = "") -> str:
        """The text of these ids, by the server's tokenizer."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response: pb.DetokenizeResponse = self._unary(lambda at: at.inference.Detokenize, request)
        return response.text

    def flush_prefix_cache(self) -> int:
        """See `AsyncClient.flush_prefix_cache`."""
        answers = self._everywhere(lambda at: at.control.FlushPrefixCache, pb.FlushPrefixCacheRequest())
        return sum(answer.num_blocks_flushed for answer in answers)

    def load_adapter(self, name: str, path: str, timeout: float | None = None) -> int:
        """See `AsyncClient.load_adapter`."""
        request = pb.ControlLoadAdapterRequest(name=name, path=path)
        answers: list[pb.ControlLoadAdapterResponse] = self._everywhere(
            lambda at: at.control.LoadAdapter, request, timeout
        )
        return answers[0].generation

    def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """See `AsyncClient.unload_adapter`."""
        request = pb.ControlUnloadAdapterRequest(name=name)
        self._everywhere(lambda at: at.control.UnloadAdapter, request, timeout)

    def flight_records(self) -> Iterator[tuple[int, bytes]]:
        """What the flight recorder of the first scheduler has, in pieces: the number of a shard, and data of its file.

        Raises RequestFailed.
        """
        server = self._servers.in_turn()[0]
        try:
            for piece in server.control.DumpFlightRecord(pb.DumpFlightRecordRequest(), metadata=self._metadata):
                yield piece.shard, piece.data
        except grpc.RpcError as error:
            raise RequestFailed.from_rpc_error(error) from None

    def _unary(self, method: Method, request: Message) -> Any:
        """The answer of the first scheduler that is there."""
        failures: list[RequestFailed] = []
        for server in self._servers.in_turn():
            try:
                return method(server)(request, timeout=_UNARY_TIMEOUT_S, metadata=self._metadata)
            except grpc.RpcError as error:
                failures.append(RequestFailed.from_rpc_error(error))
            if self._servers.is_closed or not failures[-1].is_unanswered:
                break
            self._servers.failed(server)
        raise failures[-1]

    def _everywhere(self, method: Method, request: Message, timeout: float | None = _UNARY_TIMEOUT_S) -> list[Any]:
        """The answers of all schedulers that are there; any that refuses is what this raises, or that none is."""
        answers, failures = [], []
        for server in self._servers.in_turn():
            try:
                answers.append(method(server)(request, timeout=_finite(timeout), metadata=self._metadata))
            except grpc.RpcError as error:
                failures.append(RequestFailed.from_rpc_error(error))
        if (failure := first_failure(failures, len(self._servers))) is not None:
            raise failure
        return answers

    def close(self) -> None:
        """Closes all connections; calls that are open end with an error."""
        self._servers.is_closed = True
        for server in self._servers.all:
            server.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _finite(timeout: float | None) -> float | None:
    """To gRPC a time without end is one that is past, and so is one that its clock cannot count to. Raises ValueError
    for NaN."""
    if timeout is not None and math.isnan(timeout):
        raise ValueError("timeout is nan; accepted: seconds, or None")
    return None if timeout is None or timeout >= _ENDLESS_S else timeout


def _trace(traceparent: str | None) -> Metadata:
    return current_trace() if traceparent is None else (("traceparent", traceparent),)


def _tokenize_request(
    prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool, model: str
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.messages.CopyFrom(build_messages(prompt))
    return request
