"""The schedulers that answer: connections for any number of streams, and what is passed on of a call.

A scheduler that goes away is a pause: `octavo.client` holds what has come and goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from gateway_svc.errors import InvalidField
from octavo.client import AsyncClient, Metadata
from octavo.errors import RequestFailed
from octavo.retrying import Outages, RetryPolicy, Waiting
from protos import inference_pb2 as pb

STREAMS_PER_CONNECTION = 512  # schedulers take 1,024 by default, and let more wait
MAX_WAITING_PROMPTS = 16_384  # of all calls that no scheduler answers
MAX_WAITING_BYTES = 64 * 2**20  # likewise; one call alone may have more
T = TypeVar("T")


class Schedulers:
    """For one event loop.

    Args:
        addresses: HOST:PORT or unix:PATH of one, or of several with commas between them.
        pass_headers: names of HTTP headers, in lower case, that go on as metadata.
        share_calls: streams go over a call that others share.
        credentials: of TLS; None: there is none.
    """

    def __init__(
        self,
        addresses: str,
        retry: RetryPolicy,
        pass_headers: Iterable[str] = (),
        *,
        share_calls: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._credentials = credentials
        self._addresses, self._share_calls = addresses.split(","), share_calls
        self._retry, self._on_wait = replace(retry, on_wait=self._waits), retry.on_wait
        self._is_away = False  # no scheduler has answered since a request began to wait for one
        self._num_waiting_prompts = self._num_waiting_bytes = 0
        self._passed = frozenset(name.encode("ascii") for name in pass_headers)
        self._clients: list[AsyncClient] = []
        self._num_streams: list[int] = []  # by client
        self._model_names: set[str] = set()  # as they were last asked for
        self._asking: set[asyncio.Task[Any]] = set()  # calls that somebody waits for, or has waited for

    def metadata(self, headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
        """Of a call with these headers, as ASGI has them. What is no text of ASCII stays behind: gRPC takes none."""
        return [
            (name.decode("ascii"), value.decode("ascii"))
            for name, value in headers
            if name in self._passed and value and value.isascii() and value.decode("ascii").isprintable()
        ]

    async def prepare(self, requests: Sequence[pb.GenerateRequest], metadata: Metadata) -> None:
        """To be called once for all prompts of a call, before `generate`: finds what their `model` is, and waits while
        no scheduler answers, for as much as may wait. Raises RequestFailed, InvalidField."""
        first, *others = requests
        num_bytes = sum(request.ByteSize() for request in requests)
        prompts, waiting_bytes = self._num_waiting_prompts + len(requests), self._num_waiting_bytes + num_bytes
        is_too_much = prompts > MAX_WAITING_PROMPTS or waiting_bytes > MAX_WAITING_BYTES
        if self._is_away and self._num_waiting_prompts and is_too_much:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "too many prompts wait for a scheduler")

        async def ask() -> None:
            if self._is_away:
                await self.list_models(metadata)
            await self.find_adapter(first, metadata)

        self._num_waiting_prompts, self._num_waiting_bytes = prompts, waiting_bytes
        try:
            await self.waited_for(ask, first.request_id)
        finally:
            self._num_waiting_prompts -= len(requests)
            self._num_waiting_bytes -= num_bytes
        for other in others:
            other.model, other.adapter = first.model, first.adapter

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, named: str = ""
    ) -> AsyncGenerator[AsyncGenerator[pb.GenerateResponse, None], None]:
        """The messages of `octavo.AsyncClient.stream`; leaving it ends the request.

        A `model` that was `named` and is an adapter's name is the model that the answer names.
        """
        place = self._place()
        self._num_streams[place] += 1
        try:
            async with aclosing(self._clients[place].stream(request, metadata=metadata)) as messages:
                yield messages if not named or request.model == named else _of_model(messages, named)
        finally:
            self._num_streams[place] -= 1

    async def waited_for(self, ask: Callable[[], Awaitable[T]], request_id: str) -> T:
        """What `ask` gives, asked again while no scheduler answers: a question about a request waits for one as the
        request itself does. Raises RequestFailed."""
        outages = Outages(self._retry, request_id)
        while True:
            try:
                return await ask()
            except RequestFailed as failure:
                delay_s = outages.delay_s(failure, time.monotonic())
            await asyncio.sleep(delay_s)

    async def find_adapter(self, request: pb.GenerateRequest | pb.TokenizeRequest, metadata: Metadata) -> None:
        """Makes a request whose model is an adapter's name one of the adapter. Names of models are remembered; for any
        other the scheduler is asked. Raises RequestFailed, and InvalidField where another adapter is named beside."""
        name = request.model
        if not name or name in self._model_names:
            return
        models = (await self.list_models(metadata)).models
        self._model_names = {model.name for model in models}
        self._model_names |= {f"{model.name}@{model.fingerprint}" for model in models}
        if name not in self._model_names and name in await self.list_adapters(metadata):
            request.model = ""
            if isinstance(request, pb.GenerateRequest):
                if request.adapter not in ("", name):
                    raise InvalidField("adapter", f"got {request.adapter[:256]!r}, and model {name!r} is another one")
                request.adapter = name

    async def list_adapters(self, metadata: Metadata) -> list[str]:
        """Names of those that are loaded. Raises RequestFailed."""
        info: pb.ModelInfo = await self._call("GetModelInfo", pb.GetModelInfoRequest(), metadata)
        return list(info.adapters)

    async def load_adapter(self, name: str, path: str, metadata: Metadata) -> None:
        """Into all workers that take adapters, of all schedulers. Raises RequestFailed."""
        await self._to_its_end(self._clients[self._place()].load_adapter(name, path, metadata=metadata))

    async def unload_adapter(self, name: str, metadata: Metadata) -> None:
        """Returns when nothing uses it any more. Raises RequestFailed."""
        await self._to_its_end(self._clients[self._place()].unload_adapter(name, metadata=metadata))

    async def list_models(self, metadata: Metadata) -> pb.ListModelsResponse:
        """Raises RequestFailed, like the next two."""
        answer: pb.ListModelsResponse = await self._call("ListModels", pb.ListModelsRequest(), metadata)
        return answer

    async def tokenize(self, request: pb.TokenizeRequest, metadata: Metadata) -> pb.TokenizeResponse:
        """The ids, and the text of each."""
        answer: pb.TokenizeResponse = await self._call("Tokenize", request, metadata)
        return answer

    async def detokenize(self, request: pb.DetokenizeRequest, metadata: Metadata) -> pb.DetokenizeResponse:
        """The text."""
        answer: pb.DetokenizeResponse = await self._call("Detokenize", request, metadata)
        return answer

    async def watch_steps(self, metadata: Metadata) -> AsyncGenerator[pb.StepSummary, None]:
        """Of all workers of the scheduler in use, from now on. Raises RequestFailed, as the next two do."""
        client, asked = self._clients[self._place()], pb.WatchStepsRequest()
        async with aclosing(client.follow(lambda at: at.control.WatchSteps, asked, metadata=metadata)) as steps:
            async for step in steps:
                yield step

    async def view(self, request: pb.GetViewRequest, metadata: Metadata) -> pb.View:
        """What can be drawn of that scheduler."""
        view: pb.View = await self._call("GetView", request, metadata, of_control=True)
        return view

    async def load(self, metadata: Metadata) -> pb.Load:
        """Its queues and workers."""
        load: pb.Load = await self._call("GetLoad", pb.GetLoadRequest(), metadata, of_control=True)
        return load

    async def withhold_blocks(self, request: pb.WithholdBlocksRequest, metadata: Metadata) -> pb.WithholdBlocksResponse:
        """Makes a worker's cache smaller. Raises RequestFailed."""
        answer: pb.WithholdBlocksResponse = await self._call("WithholdBlocks", request, metadata, of_control=True)
        return answer

    async def are_ready(self) -> bool:
        """Whether one of them serves, by its own account."""
        return await self._clients[self._place()].is_ready()

    async def close(self) -> None:
        """Ends all connections."""
        for client in self._clients:
            await client.close()

    async def _call(self, method: str, request: Any, metadata: Metadata, *, of_control: bool = False) -> Any:
        client = self._clients[self._place()]

        def method_of(at: Any) -> Any:
            return getattr(at.control if of_control else at.inference, method)

        try:
            answer = await self._to_its_end(client.call(method_of, request, metadata=metadata))
        except RequestFailed as failure:
            self._is_away = self._is_away and failure.is_unanswered
            raise
        self._is_away = False
        return answer

    async def _to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        """Whoever has left: a scheduler cuts a connection on which many calls are given up at once."""
        asking = asyncio.create_task(call)
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        return await asyncio.shield(asking)

    def _asked(self, asking: asyncio.Task[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # is told to nobody where nobody waits for it any more

    def _waits(self, waiting: Waiting) -> None:
        """Told once of each time without a scheduler: any number of requests wait then."""
        if not self._is_away:
            self._is_away = True
            self._on_wait(waiting)

    def _place(self) -> int:
        """The first connection with room, or one more."""
        for place, count in enumerate(self._num_streams):
            if count < STREAMS_PER_CONNECTION:
                return place
        self._clients.append(
            AsyncClient(
                self._addresses,
                retry=self._retry,
                credentials=self._credentials,
                own_connection=True,
                share_calls=self._share_calls,
            )
        )
        self._num_streams.append(0)
        return len(self._clients) - 1


async def _of_model(
    messages: AsyncIterable[pb.GenerateResponse], name: str
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The same messages; the first one names this model."""
    async for response in messages:
        if response.HasField("admission"):
            response.model = name
        yield response
