"""The `Control` service for operators: shows requests, workers and blocks; drains, flushes caches, loads adapters.

Calls are decoded here and answers encoded. What a call changes is decided and done by the engine and the worker pool.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

import octavo
from protos import SCHEMA_REVISION, inference_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.api.block_states import BlockPage
from scheduler_svc.api.model_states import model_loads
from scheduler_svc.api.request_states import RequestCopy, RequestPage
from scheduler_svc.api.server_view import ViewAsked, ViewCopy
from scheduler_svc.api.step_watch import StepWatchers
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import FieldViolation, InvalidRequest, NameTaken, UnknownName
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.serving import Serving
from scheduler_svc.workers.worker_client import WorkerClient

SERVICE = "octavo.v1.Control"
T = TypeVar("T")


class ControlService(inference_pb2_grpc.ControlServicer):
    """Over one `Serving`. State is looked at on the step loop's thread, between two steps, so that it is consistent.

    A look costs the step loop no more for more requests or blocks: long answers come in pages.

    `drain`: begins to end the server.
    """

    def __init__(self, serving: Serving, config: SchedulerConfig, drain: Callable[[], None]) -> None:
        self._serving = serving
        self._config = config
        self._drain = drain
        self._started_ns = time.monotonic_ns()
        self._step_watchers = StepWatchers(serving.engine)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.ServerInfo:
        """Version, uptime and every option as it is in force; needs no step loop."""
        model = self._serving.pool.models.default_or_none()
        return pb.ServerInfo(
            version=octavo.__version__,
            schema_revision=SCHEMA_REVISION,
            model=model.name if model else "",
            uptime_ns=time.monotonic_ns() - self._started_ns,
            settings={name: str(value) for name, value in dataclasses.asdict(self._config).items()},
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.Load:
        """Queues and workers at one moment between two steps."""
        return await self._between_steps(self._load)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        """A page of live requests, in order of arrival."""
        page, engine = RequestPage.asked(request), self._serving.engine

        def copy() -> tuple[list[RequestCopy], str]:
            return page.copy(engine.page(page.after, page.limit + 1), engine.workers)

        copies, token = await self._between_steps(copy)
        name_of = self._serving.pool.models.name_of
        states = await asyncio.to_thread(lambda: [copy.message(name_of) for copy in copies])
        return pb.ListRequestsResponse(requests=states, next_page_token=token)

    async def GetRequest(self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext) -> pb.RequestState:
        """One of this id, whichever tenant's; raises UnknownName."""
        engine = self._serving.engine

        def find() -> RequestCopy:
            for group in engine.find(request.request_id):
                return RequestCopy.of(group, engine.workers)
            raise UnknownName(f"no live request {request.request_id!r}")

        return await asyncio.to_thread((await self._between_steps(find)).message, self._serving.pool.models.name_of)

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        """All addresses, those that are not connected with their problem."""
        return await self._between_steps(lambda: pb.ListWorkersResponse(workers=self._workers()))

    async def GetBlocks(self, request: pb.GetBlocksRequest, context: grpc.aio.ServicerContext) -> pb.GetBlocksResponse:
        """A page of the blocks in use or cached; raises UnknownName for a worker that is not here."""
        page, engine = BlockPage.asked(request), self._serving.engine
        pools = await self._between_steps(lambda: page.copy(engine.workers_at(request.worker)))
        return await asyncio.to_thread(page.message, pools)

    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """A summary of each step until the caller leaves; a slow reader misses some. Raises TooMany."""
        await self._between_steps(lambda: self._serving.engine.workers_at(request.worker))
        async for summary in self._step_watchers.watch(request.worker):
            yield summary

    async def GetView(self, request: pb.GetViewRequest, context: grpc.aio.ServicerContext) -> pb.View:
        """Queues, workers, requests and blocks of one moment between two steps; raises InvalidRequest."""
        asked, engine = ViewAsked.of(request), self._serving.engine

        def copy() -> ViewCopy:
            return asked.copy(self._load(), engine.page(0, asked.max_requests + 1), engine.workers)

        taken = await self._between_steps(copy)
        return await asyncio.to_thread(taken.message, self._serving.pool.models.name_of)

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        """At one worker, or at all; what runs keeps its blocks. Raises UnknownName."""
        flushed = await asyncio.wrap_future(self._serving.engine.flush_prefix_cache(request.worker))
        return pb.FlushPrefixCacheResponse(num_blocks_flushed=flushed)

    async def WithholdBlocks(
        self, request: pb.WithholdBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.WithholdBlocksResponse:
        """At one worker. Raises UnknownName, InvalidRequest."""
        if not request.worker:
            raise InvalidRequest(FieldViolation("worker", "got none; accepted: the address of a worker"))
        withheld = await asyncio.wrap_future(self._serving.engine.withhold_blocks(request.worker, request.num_blocks))
        return pb.WithholdBlocksResponse(num_withheld=withheld)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        """One worker, or the whole server; returns at once with what is left to be done."""
        if request.worker:
            return pb.DrainResponse(num_requests_left=await asyncio.to_thread(self._serving.pool.drain, request.worker))
        self._drain()
        return pb.DrainResponse(num_requests_left=self._serving.engine.num_live)

    async def DumpFlightRecord(
        self, request: pb.DumpFlightRecordRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FlightRecordPiece]:
        """The file in pieces; raises Unsupported where the recorder is off."""
        async for piece in self._serving.flight_record():
            yield pb.FlightRecordPiece(data=piece)

    async def LoadAdapter(
        self, request: pb.ControlLoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ControlLoadAdapterResponse:
        """Returns once all workers that take adapters have it; raises RequestRefused, and then none has."""
        models = self._serving.pool.models
        models.check_any()
        if request.name in models.names:  # `model` of a request over HTTP names either
            raise NameTaken(f"adapter {request.name!r}: a model of this server has this name")
        generation = await asyncio.wrap_future(self._serving.engine.load_adapter(request.name, request.path))
        return pb.ControlLoadAdapterResponse(generation=generation)

    async def UnloadAdapter(
        self, request: pb.ControlUnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ControlUnloadAdapterResponse:
        """Returns once the last request that uses it has ended; raises RequestRefused."""
        await asyncio.wrap_future(self._serving.engine.unload_adapter(request.name))
        return pb.ControlUnloadAdapterResponse()

    async def _between_steps(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._serving.engine.call(function))

    def _load(self) -> pb.Load:
        engine = self._serving.engine
        return pb.Load(
            num_requests_running=sum(worker.num_running for worker in engine.workers),
            num_requests_waiting=engine.num_waiting,
            num_tokens_waiting=engine.num_waiting_tokens,
            workers=self._workers(),
            models=model_loads(self._serving.pool.models, engine.num_due_by_model(), engine.workers),
        )

    def _workers(self) -> list[pb.WorkerState]:
        handles = {worker.link.address: worker for worker in self._serving.engine.workers}
        clients, models = list(self._serving.pool.clients.values()), self._serving.pool.models
        return [_worker(client, handles.get(client.address), models) for client in clients]


def add_to_server(service: ControlService, server: grpc.aio.Server) -> None:
    """As the generated function does, with a `WatchSteps` whose messages are bytes already."""
    watch = grpc.unary_stream_rpc_method_handler(service.WatchSteps, pb.WatchStepsRequest.FromString, None)
    # The handler that was added first answers; the generated ones after it are for every other method.
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"WatchSteps": watch})])
    inference_pb2_grpc.add_ControlServicer_to_server(service, server)


def _worker(client: WorkerClient, handle: WorkerHandle | None, models: ServedModels) -> pb.WorkerState:
    state = pb.WorkerState(address=client.address, health=client.state.health, problem=client.state.problem)
    if handle is not None:
        state.instance_id, state.epoch = handle.info.instance_id, handle.epoch
        state.model, state.model_fingerprint = models.name_of(handle.model) or handle.info.model, handle.model
        state.num_running = handle.num_running
        state.num_preempted = handle.scheduler.groups.num_away
        state.num_device_blocks = handle.sizes.num_device_blocks
        state.num_free_device_blocks = handle.scheduler.blocks.num_free_blocks
        state.num_host_blocks = handle.sizes.num_host_blocks
        state.num_free_host_blocks = handle.scheduler.blocks.host_allocator.num_free
        state.block_size_tokens = handle.scheduler.blocks.block_size
        state.num_steps = handle.statistics.num_steps
        state.last_heard_ns = time.monotonic_ns() - handle.link.last_heard_ns
        state.adapters.extend(sorted(handle.adapters))
        state.tensor_parallel_size = max(1, handle.info.parallel.tensor_parallel_size)
        state.pipeline_parallel_size = max(1, handle.info.parallel.pipeline_parallel_size)
        if handle.is_closing:
            state.health = pb.WORKER_HEALTH_DRAINING
    return state
