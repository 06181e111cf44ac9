"""The `Front` service, which frontends of a sharded scheduler call over the parent's Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from octavo.shared import log as logging
from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.frontends.outbox import Outbox
from scheduler_svc.shards.live_ids import LiveIds

log = structlog.get_logger()

RELEASE_S = 0.05  # that the release of an id may be behind the end that its client has read


class FrontService(shards_pb2_grpc.FrontServicer):
    """Tells every frontend what the parent knows, and keeps the request ids of all of them."""

    def __init__(self) -> None:
        self.ids = LiveIds()
        self._state = shards_pb2.FrontState()
        self._boxes: set[Outbox[shards_pb2.FrontAnswer]] = set()
        self._claims: set[asyncio.Task[None]] = set()  # whose ids were live when they came

    def set_state(self, state: shards_pb2.FrontState) -> None:
        """Tells every frontend there is, and each that comes."""
        self._state = shards_pb2.FrontState()
        self._state.CopyFrom(state)
        for box in self._boxes:
            box.put(shards_pb2.FrontAnswer(state=self._state))

    def close(self) -> None:
        """Ends each frontend's stream after what is on its way."""
        for box in self._boxes:
            box.close()

    async def Connect(
        self, request_iterator: AsyncIterator[shards_pb2.FrontRequests], context: grpc.aio.ServicerContext
    ) -> None:
        """One frontend's stream; the request ids that it claimed are released when it leaves."""
        box: Outbox[shards_pb2.FrontAnswer] = Outbox()
        self._boxes.add(box)
        box.put(shards_pb2.FrontAnswer(state=self._state))
        reading = asyncio.create_task(self._read(request_iterator, box))
        try:
            async for answers in box.batches():
                await context.write(shards_pb2.FrontAnswers(answers=answers))
        finally:
            reading.cancel()
            self._boxes.discard(box)
            box.close()
            self.ids.release_all(box)

    async def _read(
        self, messages: AsyncIterator[shards_pb2.FrontRequests], box: Outbox[shards_pb2.FrontAnswer]
    ) -> None:
        try:
            async for message in messages:
                for request in message.requests:
                    self._take(request, box)
        except Exception as error:
            log.error("a frontend's message failed", exception=logging.trace(error))
        finally:
            box.close()

    def _take(self, request: shards_pb2.FrontRequest, box: Outbox[shards_pb2.FrontAnswer]) -> None:
        kind = request.WhichOneof("kind")
        if kind == "claim":
            if self._claim(request.claim, box):
                self._answer(request.claim, box, is_taken=False)
            else:
                task = asyncio.create_task(self._claim_later(request.claim, box))
                self._claims.add(task)
                task.add_done_callback(self._claims.discard)
        elif kind == "released":
            self.ids.release(box, request.released)
        elif kind == "listening":
            log.info("frontend is listening", pid=request.listening)

    async def _claim_later(self, claim: shards_pb2.IdClaim, box: Outbox[shards_pb2.FrontAnswer]) -> None:
        await asyncio.sleep(RELEASE_S)
        self._answer(claim, box, is_taken=not (box in self._boxes and self._claim(claim, box)))

    def _claim(self, claim: shards_pb2.IdClaim, box: Outbox[shards_pb2.FrontAnswer]) -> bool:
        return self.ids.claim(box, claim.number, claim.tenant, claim.request_id)

    @staticmethod
    def _answer(claim: shards_pb2.IdClaim, box: Outbox[shards_pb2.FrontAnswer], is_taken: bool) -> None:
        box.put(shards_pb2.FrontAnswer(id=shards_pb2.IdAnswer(number=claim.number, is_taken=is_taken)))
