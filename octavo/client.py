"""Clients of a remote Octavo: `AsyncClient` and `Client`, the same calls with and without asyncio.

A stream that breaks is taken up again by itself: the client draws the seed, keeps the tokens it was given and sends
the request with both to whatever scheduler answers next, so that the caller sees a pause and no more. Leaving the
iterator of `generate` early cancels the request. Every failed call raises `octavo.errors.RequestFailed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from octavo.errors import RequestFailed
from octavo.generation import Generation, RetryPolicy, build_messages, build_request
from octavo.interruptible_stream import InterruptibleStream
from octavo.outputs import RequestOutput
from octavo.rpc import CHANNEL_OPTIONS
from octavo.sampling_params import SamplingParams
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

# A scheduler that comes back is found within about a second; gRPC's own backoff grows to two minutes.
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
_UNARY_TIMEOUT_S = 30.0
_ENDED_EARLY = "the stream ended before the request did"


def channel_credentials(
    ca_file: str | Path | None = None, cert_file: str | Path | None = None, key_file: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Credentials for TLS from PEM files: who is trusted (None: the system's), and who the client is (None: nobody)."""
    trusted, cert, key = (Path(name).read_bytes() if name else None for name in (ca_file, cert_file, key_file))
    return grpc.ssl_channel_credentials(trusted, key, cert)


class _Call:
    """What both clients know about one `generate` call: its state over attempts, and its deadline."""

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy, timeout: float | None) -> None:
        self.generation = Generation(request, policy, time.monotonic_ns())
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._last_loss: RequestFailed | None = None

    def remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def receive(self, response: pb.GenerateResponse) -> RequestOutput | None:
        return self.generation.receive(response, time.monotonic_ns())

    def pause_after(self, failure: RequestFailed) -> float:
        """Seconds to wait before the next attempt; raises when there is none, or no time for it."""
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and self._last_loss is not None:
            raise RequestFailed(failure.code, f"no time for another attempt after: {self._last_loss}")
        delay = self.generation.retry_delay_s(failure)
        self._last_loss = failure
        remaining = self.remaining_s()
        if remaining is not None and remaining <= delay:
            raise RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"no time for another attempt after: {failure}")
        return delay


class _Settings:
    """What both clients are made of, apart from the kind of channel."""

    def __init__(self, api_key: str | None, retry: RetryPolicy | None) -> None:
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retry = retry or RetryPolicy()


class AsyncClient(_Settings):
    """Calls one scheduler from an event loop. Use as an async context manager, or `await close()`.

    `address` is any gRPC target; `credentials` (see `channel_credentials`) switch TLS on.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(api_key, retry)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._control = pb_grpc.ControlStub(self._channel)

    async def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams what the model writes; each item brings what is new, the last one has `finished` set.

        Options are `prompt_token_ids` or `messages` in place of `prompt`, `request_id`, `stream`, `priority`,
        `adapter`, `model`, `tenant`, `cache_salt`, `add_special_tokens`, `truncate_prompt_tokens`,
        `return_prompt_token_ids`, `add_generation_prompt`, `continue_final_message`, with the defaults of
        `GenerateRequest`. `timeout` is in seconds, over all attempts.
        """
        call = _Call(build_request(prompt, sampling_params, **options), self._retry, timeout)
        while not call.generation.finished:
            stream = self._stub.Generate(call.generation.request, timeout=call.remaining_s(), metadata=self._metadata)
            try:
                async for response in stream:
                    if output := call.receive(response):
                        yield output
                failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, _ENDED_EARLY)
            except grpc.RpcError as error:
                failure = RequestFailed.from_rpc_error(error)
            finally:
                stream.cancel()
            if not call.generation.finished:
                await asyncio.sleep(call.pause_after(failure))

    async def complete(
        self, prompt: str | None = None, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """`generate` in one piece: the whole output, when it is finished."""
        async for output in self.generate(prompt, sampling_params, stream=False, **options):
            if output.finished:
                return output
        raise RequestFailed(grpc.StatusCode.INTERNAL, _ENDED_EARLY)

    async def abort(self, request_id: str) -> bool:
        """Ends a request, whoever sent it; False when there is none of that id."""
        return (await self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id))).found

    async def model_info(self) -> pb.ModelInfo:
        """What is served: name, architecture, vocabulary, lengths."""
        return await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or of a conversation rendered with the model's chat template."""
        return list((await self._unary(self._stub.Tokenize, _tokenize_request(prompt, add_special_tokens))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._unary(self._stub.Detokenize, request)).text

    async def flush_prefix_cache(self) -> int:
        """Lets every worker forget what prompts it has computed; how many cache blocks could be found before."""
        return (await self._unary(self._control.FlushPrefixCache, pb.FlushPrefixCacheRequest())).num_blocks_flushed

    async def load_adapter(self, name: str, path: str, timeout: float | None = None) -> int:
        """Loads an adapter from where the workers see it; `generate` may name it as soon as this returns.

        Loading again what is there from the same path changes nothing. Returns its generation: what is loaded under a
        name later is another one.
        """
        request = pb.ControlLoadAdapterRequest(name=name, path=path)
        return (await self._unary(self._control.LoadAdapter, request, timeout)).generation

    async def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """Unloads an adapter. New requests may not name it at once; this returns when those before have ended."""
        await self._unary(self._control.UnloadAdapter, pb.ControlUnloadAdapterRequest(name=name), timeout)

    async def _unary(self, method: Any, request: Any, timeout: float | None = _UNARY_TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise RequestFailed.from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Client(_Settings):
    """`AsyncClient` for plain threads: the same arguments, and methods that block. Safe to share between threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(api_key, retry)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._control = pb_grpc.ControlStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """See `AsyncClient.generate`."""
        call = _Call(build_request(prompt, sampling_params, **options), self._retry, timeout)
        while not call.generation.finished:
            stream = self._start(call)
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
                time.sleep(call.pause_after(failure))

    def _start(self, call: _Call) -> InterruptibleStream[pb.GenerateResponse]:
        request, metadata = call.generation.request, self._metadata
        return InterruptibleStream(lambda: self._stub.Generate(request, timeout=call.remaining_s(), metadata=metadata))

    def complete(
        self, prompt: str | None = None, sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """`generate` in one piece: the whole output, when it is finished."""
        for output in self.generate(prompt, sampling_params, stream=False, **options):
            if output.finished:
                return output
        raise RequestFailed(grpc.StatusCode.INTERNAL, _ENDED_EARLY)

    def abort(self, request_id: str) -> bool:
        """Ends a request, whoever sent it; False when there is none of that id."""
        return self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id)).found

    def model_info(self) -> pb.ModelInfo:
        """What is served: name, architecture, vocabulary, lengths."""
        return self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or of a conversation rendered with the model's chat template."""
        return list(self._unary(self._stub.Tokenize, _tokenize_request(prompt, add_special_tokens)).token_ids)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._unary(self._stub.Detokenize, request).text

    def flush_prefix_cache(self) -> int:
        """See `AsyncClient.flush_prefix_cache`."""
        return self._unary(self._control.FlushPrefixCache, pb.FlushPrefixCacheRequest()).num_blocks_flushed

    def load_adapter(self, name: str, path: str, timeout: float | None = None) -> int:
        """See `AsyncClient.load_adapter`."""
        request = pb.ControlLoadAdapterRequest(name=name, path=path)
        return self._unary(self._control.LoadAdapter, request, timeout).generation

    def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """See `AsyncClient.unload_adapter`."""
        self._unary(self._control.UnloadAdapter, pb.ControlUnloadAdapterRequest(name=name), timeout)

    def _unary(self, method: Any, request: Any, timeout: float | None = _UNARY_TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise RequestFailed.from_rpc_error(error) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _tokenize_request(prompt: str | Sequence[Mapping[str, str]], add_special_tokens: bool) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(prompt=prompt, add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(messages=build_messages(prompt), add_special_tokens=add_special_tokens)
