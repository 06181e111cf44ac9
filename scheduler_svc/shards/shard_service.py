"""The `Shard` service, which the parent of a shard calls over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import structlog
from prometheus_client import CollectorRegistry

from octavo.shared import log as logging
from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.api.metrics_exporter import EngineCollector
from scheduler_svc.api.metrics_server import told
from scheduler_svc.api.request_states import LARGEST_PAGE, RequestCopy, RequestPage
from scheduler_svc.config import MAX_SHARDS
from scheduler_svc.serving import Serving

log = structlog.get_logger()

STATUS_INTERVAL_S = 0.2


class ShardService(shards_pb2_grpc.ShardServicer):
    """Attributes:
    ended: the parent's stream has ended, and with it the shard's life.
    """

    def __init__(self, serving: Serving) -> None:
        self.ended = asyncio.Event()
        self._serving = serving
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(serving.engine))

    async def Own(
        self, request_iterator: AsyncIterator[shards_pb2.WorkerShare], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[shards_pb2.ShardStatus]:
        """The shard's life: which workers it has comes in, how it is goes out, until the parent ends the stream."""
        holding = asyncio.create_task(self._hold(request_iterator))
        told = None
        try:
            while not holding.done():
                if (status := self._status()) != told:
                    told = status
                    yield status
                await asyncio.wait([holding], timeout=STATUS_INTERVAL_S)
        finally:
            holding.cancel()
            self.ended.set()

    async def ListRequests(
        self, request: shards_pb2.ListNumberedRequests, context: grpc.aio.ServicerContext
    ) -> shards_pb2.NumberedRequests:
        """A page of live requests with the numbers that order them among those of other shards."""
        engine = self._serving.engine
        page = RequestPage(request.after, min(request.limit, LARGEST_PAGE))

        def copy() -> tuple[list[RequestCopy], str, list[int]]:
            numbered = engine.page(page.after, page.limit + 1)
            return *page.copy(numbered, engine.workers), [number for number, _ in numbered]

        copies, token, numbers = await asyncio.wrap_future(engine.call(copy))
        name_of = self._serving.pool.models.name_of
        states = await asyncio.to_thread(lambda: [copy.message(name_of) for copy in copies])
        return shards_pb2.NumberedRequests(requests=states, numbers=numbers[: len(states)], is_last=not token)

    async def GetMetrics(
        self, request: shards_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> shards_pb2.MetricsText:
        """All metrics as OpenMetrics, with their exemplars."""
        return shards_pb2.MetricsText(text=told(self._registry)[0])

    async def _hold(self, shares: AsyncIterator[shards_pb2.WorkerShare]) -> None:
        try:
            async for share in shares:
                await asyncio.to_thread(self._serving.pool.hold, list(share.addresses), share.drained)
        except Exception as error:
            log.error("a share of the workers could not be taken", exception=logging.trace(error))

    def _status(self) -> shards_pb2.ShardStatus:
        serving = self._serving
        model = serving.pool.models.default_or_none()
        return shards_pb2.ShardStatus(
            is_ready=serving.is_ready,
            serving=sorted(worker.link.address for worker in list(serving.engine.workers)),
            model=model.name if model is not None else "",
            drained=sorted(serving.pool.drained),
        )


def request_numbers(shard: int, clock_ns: Callable[[], int]) -> Iterator[int]:
    """Rise with time, so that requests of all shards can be put in the order in which they were taken."""
    last = 0
    while True:
        last = max(last + 1, clock_ns() // 1000)
        yield last * MAX_SHARDS + shard
