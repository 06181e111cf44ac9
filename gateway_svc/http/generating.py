"""The endpoints that generate: a body becomes requests, and what comes of these an answer, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway_svc import errors
from gateway_svc.answers.answer import Answer
from gateway_svc.answers.completions import CompletionAnswer
from gateway_svc.answers.gathered import Gathered
from gateway_svc.errors import HttpError
from gateway_svc.http.bodies import ClientGone, read_json, shutting_down
from gateway_svc.http.metrics import GatewayMetrics, Told
from gateway_svc.http.replies import EventStream, send_error, send_parts, while_connected
from gateway_svc.http.server_trace import ServerTrace, ending
from gateway_svc.live.live_feeds import LiveFeeds
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.fields import Fields
from gateway_svc.upstream.schedulers import Schedulers
from gateway_svc.upstream.statuses import http_error
from octavo.client import Metadata
from octavo.errors import RequestFailed
from octavo.shared import log as logging
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb

log = structlog.get_logger()

REQUEST_ID = "x-request-id"


@dataclass(frozen=True, slots=True)
class Service:
    """What every endpoint needs."""

    schedulers: Schedulers
    metrics: GatewayMetrics
    max_body_bytes: int
    live: LiveFeeds
    silence_s: float  # after which a stream gets a comment; 0: none
    tracer: Tracer | None = None  # while tracing is on


class Generating:
    """An ASGI application for one path.

    Args:
        read: a body to what it asks for. Raises HttpError.
        answer: what makes an answer of it.
    """

    def __init__(
        self, path: str, service: Service, read: Callable[[Fields], Asked], answer: Callable[[Asked], Answer]
    ) -> None:
        self._path, self._service, self._read, self._answer = path, service, read, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever becomes of it."""
        headers, tracer = Headers(scope=scope), self._service.tracer
        trace = None if tracer is None else ServerTrace(tracer, headers.items(), self._path)
        with self._service.metrics.request(self._path) as told, ending(trace, told):
            try:
                body = await read_json(headers, receive, self._service.max_body_bytes)
                asked = self._read(Fields(body))
                metadata = self._service.schedulers.metadata(headers.raw)
                if trace is not None:
                    metadata = trace.metadata(metadata)
                    trace.asked(asked.id, asked.requests)
                call = _Call(self._service, told, self._path, asked, self._answer(asked), metadata)
                await (call.stream(receive, send) if asked.streams else call.whole(receive, send))
            except ClientGone:
                pass  # and its requests with it
            except HttpError as error:
                told.status = error.status
                await send_error(send, error)


class _Call:
    """One call that was understood."""

    def __init__(
        self, service: Service, told: Told, path: str, asked: Asked, answer: Answer, metadata: Metadata
    ) -> None:
        self._service, self._told, self._path = service, told, path
        self._asked, self._answer, self._metadata = asked, answer, metadata
        self._headers = {REQUEST_ID: asked.id}
        self._model = asked.requests[0].model
        self._admissions: dict[int, pb.GenerateResponse] = {}  # by prompt, the first of each
        self._all_admitted = asyncio.Event()

    async def whole(self, receive: Receive, send: Send) -> None:
        """Raises HttpError, ClientGone."""
        gathered = [Gathered() for _ in self._asked.requests]

        async def gather(prompt: int) -> None:
            async with self._generate(prompt) as messages:
                async for response in messages:
                    gathered[prompt].take(response)

        try:
            async with while_connected(receive):
                await self._for_each_prompt(gather)
                await self._learn_prompts([found.prompt_token_ids for found in gathered])
        except asyncio.CancelledError:
            raise shutting_down() from None
        self._service.metrics.begun(self._told, self._path)
        self._told.status = 200
        self._told.output_tokens = sum(found.usage.completion_tokens for found in gathered)
        await send_parts(send, self._answer.whole(gathered), self._headers)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Raises HttpError while nothing is written, ClientGone."""
        stream = EventStream(send, self._headers)
        try:
            async with while_connected(receive), stream.kept_alive(self._service.silence_s):
                await self._for_each_prompt(lambda prompt: self._follow(prompt, stream))
            last = self._answer.end()
        except (HttpError, asyncio.CancelledError) as failure:
            error = failure if isinstance(failure, HttpError) else shutting_down()
            if not stream.is_begun:
                raise error from None
            self._told.status = error.status
            last = self._answer.failed(error)
        await stream.end(last)

    async def _follow(self, prompt: int, stream: EventStream) -> None:
        """Writes what comes for one prompt, once all of them have been admitted: refusals have their own status."""
        answer, told = self._answer, self._told
        async with self._generate(prompt) as messages:
            async for response in messages:
                if response.HasField("admission"):
                    await self._admitted(prompt, response, stream)
                    if not response.outputs:
                        continue
                if events := answer.events(prompt, response):
                    await stream.write(events)
                    if not told.is_begun:
                        self._service.metrics.begun(told, self._path)
                if response.HasField("usage"):
                    told.output_tokens += response.usage.completion_tokens

    def _generate(self, prompt: int) -> AbstractAsyncContextManager[AsyncIterator[pb.GenerateResponse]]:
        return self._service.schedulers.generate(self._asked.requests[prompt], self._metadata, self._model)

    async def _admitted(self, prompt: int, response: pb.GenerateResponse, stream: EventStream) -> None:
        if prompt in self._admissions:
            return  # of a later attempt
        self._admissions[prompt] = response
        if len(self._admissions) == len(self._asked.requests):
            admissions = [self._admissions[each] for each in range(len(self._asked.requests))]
            await self._learn_prompts([each.prompt_token_ids for each in admissions])
            self._told.status = 200
            await stream.begin()
            if events := self._answer.begin(admissions):
                await stream.write(events)
            self._all_admitted.set()
        else:
            await self._all_admitted.wait()

    async def _learn_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Texts that an echo shows: of prompts, and of their first tokens, which have no logprobs."""
        if not (self._asked.echoes and isinstance(self._answer, CompletionAnswer)):
            return
        requests, with_logprobs = self._asked.requests, self._asked.num_top is not None
        prompts, first_tokens = [], []
        for request, ids in zip(requests, token_ids, strict=True):
            prompts.append(await self._prompt_text(request, ids))
            if with_logprobs:
                first_tokens.append(pb.Logprob(token_id=ids[0], text=await self._text(request, ids[:1])))
        self._answer.learn_prompts(prompts, first_tokens)

    async def _prompt_text(self, request: pb.GenerateRequest, kept: Sequence[int]) -> str:
        """As it was sent, unless it came as ids or was cut to the tokens that were `kept`."""
        by_ids = request.WhichOneof("prompt_kind") == "prompt_token_ids"
        if request.HasField("truncate_prompt_tokens") and len(kept) == request.truncate_prompt_tokens:
            text = await self._text(request, kept)
            is_whole = not by_ids and request.prompt in text  # beside what a tokenizer adds: BOS
            return request.prompt if is_whole else text
        return await self._text(request, request.prompt_token_ids.ids) if by_ids else request.prompt

    async def _text(self, request: pb.GenerateRequest, ids: Sequence[int]) -> str:
        schedulers, question = self._service.schedulers, pb.DetokenizeRequest(model=request.model, token_ids=ids)

        def ask() -> Awaitable[pb.DetokenizeResponse]:
            return schedulers.detokenize(question, self._metadata)

        try:
            return (await schedulers.waited_for(ask, request.request_id)).text
        except RequestFailed as failure:
            raise http_error(failure, self._asked.names) from None

    async def _for_each_prompt(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """All at once. The first that fails ends the others. Raises HttpError."""
        try:
            await self._service.schedulers.prepare(self._asked.requests, self._metadata)
        except RequestFailed as failure:
            raise self._error(failure) from None
        try:
            # A task for one prompt, too: what comes passes through few coroutines then (4 % of a token's CPU time).
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(self._asked.requests)):
                    group.create_task(work(prompt))
        except BaseExceptionGroup as failures:
            raise self._error(failures.exceptions[0]) from None

    def _error(self, failure: BaseException) -> BaseException:
        if isinstance(failure, HttpError | ClientGone):
            return failure
        if isinstance(failure, RequestFailed):
            return http_error(failure, self._asked.names)
        log.error("request failed", request_id=self._asked.id, exception=logging.trace(failure))
        return HttpError(500, "the gateway failed over this request; its log says why", type=errors.SERVER)
