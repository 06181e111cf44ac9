"""The `Core` service, which frontend processes of this scheduler call over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from octavo.shared import log as logging
from protos import frontend_pb2, frontend_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRefused
from scheduler_svc.frontends.frontend_links import FrontendLink, FrontendLinks
from scheduler_svc.frontends.frontend_messages import encode_refusal
from scheduler_svc.serving import Serving

log = structlog.get_logger()


class CoreService(frontend_pb2_grpc.CoreServicer):
    """A link for as long as a frontend is connected."""

    def __init__(self, serving: Serving, links: FrontendLinks) -> None:
        self._serving = serving
        self._links = links

    async def Connect(
        self, request_iterator: AsyncIterator[frontend_pb2.FrontendMessage], context: grpc.aio.ServicerContext
    ) -> None:
        """One frontend's stream: its requests in, tokens and ends out; what it had is aborted when it leaves."""
        link = FrontendLink(self._serving)
        self._links.add(link)
        reading = asyncio.create_task(_read(request_iterator, link))
        try:
            async for events in link.outbox.batches():
                is_queue_full = self._serving.engine.is_full
                await context.write(frontend_pb2.CoreMessage(events=events, is_queue_full=is_queue_full))
        finally:
            reading.cancel()
            self._links.remove(link)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends requests of an id, whichever frontend has them."""
        tenant = request.tenant if request.HasField("tenant") else None
        return pb.AbortResponse(found=self._serving.engine.abort(request.request_id, tenant))

    async def CheckRoom(
        self, request: frontend_pb2.CheckRoomRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.CheckRoomResponse:
        """Refuses a request before its text is prepared, where the queue is full."""
        try:
            self._serving.engine.check_room(
                request.tenant, request.request_id, request.num_preparing, request.num_bytes
            )
        except RequestRefused as error:
            return frontend_pb2.CheckRoomResponse(refused=encode_refusal(0, error))
        return frontend_pb2.CheckRoomResponse()

    async def ListAdapters(
        self, request: frontend_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> frontend_pb2.ListAdaptersResponse:
        """Names of those that a request may use now."""
        return frontend_pb2.ListAdaptersResponse(names=self._serving.engine.adapter_names())


async def _read(messages: AsyncIterator[frontend_pb2.FrontendMessage], link: FrontendLink) -> None:
    try:
        async for message in messages:
            for event in message.events:
                link.take(event)
    except Exception as error:
        log.error("a frontend's message failed", exception=logging.trace(error))
    finally:
        link.outbox.close()
