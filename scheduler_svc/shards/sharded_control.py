"""The `Control` service over all shards: each is asked, and their answers are put together as if one had answered."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

import octavo
from protos import SCHEMA_REVISION, inference_pb2_grpc, shards_pb2
from protos import inference_pb2 as pb
from scheduler_svc.api.pages import bad_token
from scheduler_svc.api.request_states import RequestPage
from scheduler_svc.api.server_view import ViewAsked, merged
from scheduler_svc.api.step_watch import MAX_WAITING, check_watchers
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import UnknownName
from scheduler_svc.frontends.forwarding import answer_of, failing_alike
from scheduler_svc.shards.live_ids import LiveIds
from scheduler_svc.shards.sharded_adapters import ShardedAdapters
from scheduler_svc.shards.shards import LiveShard, Shards

ASK_TIMEOUT_S = 30.0  # of one that is stopped, which its link finds sooner
A = TypeVar("A")


class ShardedControl(inference_pb2_grpc.ControlServicer):
    """`drain`: begins to end the server. What a shard cannot be asked while it is away is left out."""

    def __init__(self, shards: Shards, ids: LiveIds[Any], config: SchedulerConfig, drain: Callable[[], None]) -> None:
        self._shards = shards
        self._ids = ids
        self._config = config
        self._drain = drain
        self._adapters = ShardedAdapters(shards)
        self._num_watchers = 0
        self._started_ns = time.monotonic_ns()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.ServerInfo:
        """Of this parent; the model is that of the first shard that has one."""
        models = [live.status.model for live in self._shards.live.values() if live.status.model]
        return pb.ServerInfo(
            version=octavo.__version__,
            schema_revision=SCHEMA_REVISION,
            model=models[0] if models else "",
            uptime_ns=time.monotonic_ns() - self._started_ns,
            settings={name: str(value) for name, value in dataclasses.asdict(self._config).items()},
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.Load:
        """Sums over shards, and every worker."""
        return self._sum(await self._all(lambda live: live.control.GetLoad(request, timeout=ASK_TIMEOUT_S)))

    async def GetView(self, request: pb.GetViewRequest, context: grpc.aio.ServicerContext) -> pb.View:
        """Of all shards, each at a moment of its own."""
        asked = ViewAsked.of(request)
        views = await self._all(lambda live: live.control.GetView(request, timeout=ASK_TIMEOUT_S))
        whole = merged(views, asked.max_requests)
        whole.load.CopyFrom(self._sum([view.load for view in views]))
        return whole

    def _sum(self, loads: list[pb.Load]) -> pb.Load:
        whole = pb.Load()
        for load in loads:
            whole.num_requests_running += load.num_requests_running
            whole.num_requests_waiting += load.num_requests_waiting
            whole.num_tokens_waiting += load.num_tokens_waiting
            whole.workers.extend(load.workers)
            for model in load.models:
                _add_model(whole, model)
        self._sort(whole.workers)
        return whole

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        """A page over all shards, in order of admission."""
        page = RequestPage.asked(request)
        asked = shards_pb2.ListNumberedRequests(after=page.after, limit=page.limit)
        answers = await self._all(lambda live: live.shard.ListRequests(asked, timeout=ASK_TIMEOUT_S))
        return merged_page(answers, page.limit)

    async def GetRequest(self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext) -> pb.RequestState:
        """From whichever shard has it; raises UnknownName."""
        found: list[pb.RequestState] = await self._all(
            lambda live: live.control.GetRequest(request, timeout=ASK_TIMEOUT_S)
        )
        if found:
            return found[0]
        raise UnknownName(f"no live request {request.request_id!r}")

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        """Those of all shards, in the order in which they were named."""
        answers = await self._all(lambda live: live.control.ListWorkers(request, timeout=ASK_TIMEOUT_S))
        response = pb.ListWorkersResponse(workers=[worker for answer in answers for worker in answer.workers])
        self._sort(response.workers)
        return response

    async def GetBlocks(self, request: pb.GetBlocksRequest, context: grpc.aio.ServicerContext) -> pb.GetBlocksResponse:
        """Shard by shard; the page's token names the shard."""
        if request.worker:
            async with failing_alike(context):
                page: pb.GetBlocksResponse = await self._owner(request.worker).control.GetBlocks(
                    request, timeout=ASK_TIMEOUT_S
                )
            return page
        place, _, token = request.page_token.partition("/")
        if place and not (place.isascii() and place.isdecimal() and len(place) < 6):
            raise bad_token()
        first = int(place or 0)
        for index in sorted(index for index in self._shards.live if index >= first):
            asked = pb.GetBlocksRequest()
            asked.CopyFrom(request)
            asked.page_token = token if index == first else ""
            if (live := self._shards.live.get(index)) is None:
                continue  # it was lost meanwhile
            async with failing_alike(context):
                page = await live.control.GetBlocks(asked, timeout=ASK_TIMEOUT_S)
            if page.next_page_token:
                page.next_page_token = f"{index}/{page.next_page_token}"
            elif any(other > index for other in self._shards.live):
                page.next_page_token = f"{index + 1}/"
            if page.blocks or not page.next_page_token:
                return page
        return pb.GetBlocksResponse()

    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepSummary]:
        """Of one worker, or of all, shards that come later included; a slow reader misses some. Raises TooMany."""
        check_watchers(self._num_watchers)
        self._num_watchers += 1
        try:
            async with failing_alike(context):
                if request.worker:
                    async for step in self._owner(request.worker).control.WatchSteps(request):
                        yield step
                else:
                    async for step in self._steps_of_all(request):
                        yield step
        finally:
            self._num_watchers -= 1

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        """At one worker, or at all."""
        if request.worker:
            async with failing_alike(context):
                flushed: pb.FlushPrefixCacheResponse = await self._owner(request.worker).control.FlushPrefixCache(
                    request, timeout=ASK_TIMEOUT_S
                )
            return flushed
        answers = await self._all(lambda live: live.control.FlushPrefixCache(request, timeout=ASK_TIMEOUT_S))
        return pb.FlushPrefixCacheResponse(num_blocks_flushed=sum(answer.num_blocks_flushed for answer in answers))

    async def WithholdBlocks(
        self, request: pb.WithholdBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.WithholdBlocksResponse:
        """By the worker's shard."""
        async with failing_alike(context):
            withheld: pb.WithholdBlocksResponse = await self._owner(request.worker).control.WithholdBlocks(
                request, timeout=ASK_TIMEOUT_S
            )
        return withheld

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        """One worker, by its shard; or the whole server."""
        if request.worker:
            async with failing_alike(context):
                drained: pb.DrainResponse = await self._owner(request.worker).control.Drain(
                    request, timeout=ASK_TIMEOUT_S
                )
            return drained
        self._drain()
        return pb.DrainResponse(num_requests_left=len(self._ids))

    async def DumpFlightRecord(
        self, request: pb.DumpFlightRecordRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FlightRecordPiece]:
        """A file of each shard, one after the other."""
        for index in sorted(self._shards.live):
            if (live := self._shards.live.get(index)) is None:
                continue  # it was lost meanwhile
            async with failing_alike(context):
                async for piece in live.control.DumpFlightRecord(request):
                    piece.shard = index
                    yield piece

    async def LoadAdapter(
        self, request: pb.ControlLoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ControlLoadAdapterResponse:
        """At all shards; where one refuses it, at none."""
        async with failing_alike(context):
            return await self._adapters.load(request)

    async def UnloadAdapter(
        self, request: pb.ControlUnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ControlUnloadAdapterResponse:
        """At all shards; refused where none has it."""
        async with failing_alike(context):
            return await self._adapters.unload(request)

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def _all(self, ask: Callable[[LiveShard], Awaitable[A]]) -> list[A]:
        """The answers of those that have one, in order of index."""
        lives = [self._shards.live[index] for index in sorted(self._shards.live)]
        answers = await asyncio.gather(*(_answer(ask(live)) for live in lives))
        return [answer for answer in answers if answer is not None]

    def _owner(self, address: str) -> LiveShard:
        owner = self._shards.owner(address)
        if owner is None:
            known = ", ".join(self._shards.addresses) or "none"
            raise UnknownName(f"no worker {address!r}; there are: {known}")
        return owner

    def _sort(self, workers: Any) -> None:
        places = {address: place for place, address in enumerate(self._shards.addresses)}
        workers.sort(key=lambda worker: places.get(worker.address, len(places)))

    async def _steps_of_all(self, request: pb.WatchStepsRequest) -> AsyncIterator[pb.StepSummary]:
        """Also of shards that come later. A watcher that reads slowly misses some, as with one.

        Raises AioRpcError where a shard that is up refuses.
        """
        steps: asyncio.Queue[pb.StepSummary | grpc.aio.AioRpcError] = asyncio.Queue(MAX_WAITING)
        watched: dict[LiveShard, asyncio.Task[None]] = {}

        async def watch(live: LiveShard) -> None:
            try:
                async for step in live.control.WatchSteps(request):
                    if not steps.full():
                        steps.put_nowait(step)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # which one that is lost is
                    await steps.put(error)

        def begin(live: LiveShard) -> None:
            watched[live] = asyncio.create_task(watch(live))

        self._shards.came.append(begin)
        try:
            for live in self._shards.live.values():
                begin(live)
            while True:
                step = await steps.get()
                if isinstance(step, grpc.aio.AioRpcError):
                    raise step
                yield step
        finally:
            self._shards.came.remove(begin)
            for task in watched.values():
                task.cancel()
            await asyncio.gather(*watched.values(), return_exceptions=True)


def merged_page(answers: list[shards_pb2.NumberedRequests], limit: int) -> pb.ListRequestsResponse:
    """The first of all requests by number. A page that a shard cut short bounds the others: behind it may be more."""
    bound = min((answer.numbers[-1] for answer in answers if answer.numbers and not answer.is_last), default=None)
    numbered = heapq.merge(
        *(zip(answer.numbers, answer.requests, strict=True) for answer in answers), key=lambda each: each[0]
    )
    response, last = pb.ListRequestsResponse(), 0
    for number, state in numbered:
        if len(response.requests) == limit or (bound is not None and number > bound):
            response.next_page_token = str(last)
            return response
        response.requests.append(state)
        last = number
    if bound is not None:
        response.next_page_token = str(last)
    return response


def _add_model(whole: pb.Load, model: pb.ModelLoad) -> None:
    mine = next((each for each in whole.models if each.fingerprint == model.fingerprint), None)
    if mine is None:
        whole.models.append(model)
        return
    mine.num_requests_running += model.num_requests_running
    mine.num_requests_waiting += model.num_requests_waiting
    mine.num_workers_serving += model.num_workers_serving
    mine.num_workers_draining += model.num_workers_draining


async def _answer(call: Awaitable[A]) -> A | None:
    """None: it does not know, or is gone."""
    try:
        return await answer_of(call)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return None
        raise
