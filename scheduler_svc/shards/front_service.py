"""The `Front` service, which frontends of a sharded scheduler call over the parent's Unix socket."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import grpc
import structlog

from octavo.shared import log as logging
from octavo.shared.access.tenant_limits import TenantTable
from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.errors import InvalidRequest
from scheduler_svc.frontends.frontend_messages import encode_over_limit
from scheduler_svc.frontends.outbox import Outbox
from scheduler_svc.limits.over_limit import OverLimit
from scheduler_svc.limits.tenant_account import Ask
from scheduler_svc.limits.tenant_ledger import TenantLedger
from scheduler_svc.shards.live_ids import LiveIds

log = structlog.get_logger()

RELEASE_S = 0.05  # that the release of an id may be behind the end that its client has read


_Box = Outbox[shards_pb2.FrontAnswer]


class FrontService(shards_pb2_grpc.FrontServicer):
    """Tells every frontend what the parent knows, and keeps the request ids and the tenants' limits for all of them.

    A claim is answered when its request may go to a shard: until then its tenant's limit holds it here. `table`: what
    tenants may have; None: no limits.
    """

    def __init__(self, table: Callable[[], TenantTable] | None = None) -> None:
        self.ids = LiveIds[_Box]()
        self._ledger = TenantLedger[tuple[_Box, int]](table) if table is not None else None
        self._state = shards_pb2.FrontState()
        self._boxes: dict[_Box, deque[asyncio.Future[bool]]] = {}  # and aborts that each has yet to answer, in order
        self._later: set[tuple[_Box, int]] = set()  # claims whose ids were live when they came
        self._tasks: set[asyncio.Task[None]] = set()  # of these claims, and aborts

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
        aborts = self._boxes[box] = deque()
        box.put(shards_pb2.FrontAnswer(state=self._state))
        reading = asyncio.create_task(self._read(request_iterator, box))
        try:
            async for answers in box.batches():
                await context.write(shards_pb2.FrontAnswers(answers=answers))
        finally:
            reading.cancel()
            del self._boxes[box]
            box.close()
            for answer in aborts:
                answer.set_result(False)  # what it had ends with it
            numbers = self.ids.release_all(box)
            if self._ledger is not None:
                for number in numbers:
                    self._answer_held(self._ledger.ended((box, number)))

    async def _read(
        self, messages: AsyncIterator[shards_pb2.FrontRequests], box: Outbox[shards_pb2.FrontAnswer]
    ) -> None:
        try:
            async for message in messages:
                for request in message.requests:
                    self._take(request, box)
                self.look()
        except Exception as error:
            log.error("a frontend's message failed", exception=logging.trace(error))
        finally:
            box.close()

    def _take(self, request: shards_pb2.FrontRequest, box: Outbox[shards_pb2.FrontAnswer]) -> None:
        kind = request.WhichOneof("kind")
        if kind == "claim":
            if self._claim(request.claim, box):
                self._admit(request.claim, box)
            else:
                self._later.add((box, request.claim.number))
                self._begin(self._claim_later(request.claim, box))
        elif kind == "check":
            self._check(request.check, box)
        elif kind == "released":
            self._later.discard((box, request.released))
            self.ids.release(box, request.released)
            if self._ledger is not None:
                self._answer_held(self._ledger.ended((box, request.released)))
        elif kind == "refused":
            self.ids.release(box, request.refused)
            if self._ledger is not None:
                self._answer_held(self._ledger.cancel((box, request.refused), time.monotonic()))
        elif kind == "used":
            if self._ledger is not None:
                self._ledger.charge((box, request.used.number), request.used.num_tokens, time.monotonic())
        elif kind == "abort":
            self._begin(self._abort(request.abort, box))
        elif kind == "aborted":
            self._boxes[box].popleft().set_result(request.aborted)
        elif kind == "echo":
            box.put(shards_pb2.FrontAnswer(echo=request.echo))
        elif kind == "listening":
            log.info("frontend is listening", pid=request.listening)

    def _begin(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _claim_later(self, claim: shards_pb2.IdClaim, box: Outbox[shards_pb2.FrontAnswer]) -> None:
        await asyncio.sleep(RELEASE_S)
        if (box, claim.number) not in self._later:
            return  # it was given up meanwhile, and nobody would ever release it
        self._later.remove((box, claim.number))
        if box in self._boxes and self._claim(claim, box):
            self._admit(claim, box)
        else:
            self._answer(box, claim.number, is_taken=True)

    def _claim(self, claim: shards_pb2.IdClaim, box: Outbox[shards_pb2.FrontAnswer]) -> bool:
        return self.ids.claim(box, claim.number, claim.tenant, claim.request_id)

    async def _abort(self, abort: shards_pb2.IdAbort, asker: _Box) -> None:
        """Held ones end here. The others may be at a shard, or on their way to one: who claimed them knows."""
        found, asked = False, list[asyncio.Future[bool]]()
        for claim in self.ids.find(abort.request_id, abort.tenant if abort.HasField("tenant") else None):
            box, number = claim
            if self._ledger is not None and self._ledger.is_held(claim):
                self.ids.release(box, number)
                self._answer_held(self._ledger.ended(claim))
                box.put(shards_pb2.FrontAnswer(id=shards_pb2.IdAnswer(number=number, is_aborted=True)))
                found = True
            else:
                box.put(shards_pb2.FrontAnswer(abort_claim=number))
                asked.append(asyncio.get_running_loop().create_future())
                self._boxes[box].append(asked[-1])
        found = any(await asyncio.gather(*asked)) or found
        asker.put(shards_pb2.FrontAnswer(aborted=shards_pb2.IdAborted(number=abort.number, found=found)))

    # ---- limits of tenants ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """To be called now and then: the limits may have changed."""
        if self._ledger is not None:
            self._answer_held(self._ledger.look(time.monotonic()))

    @property
    def num_held(self) -> int:
        """Requests that a limit of their tenant holds."""
        return 0 if self._ledger is None else self._ledger.num_held

    def _check(self, asked: shards_pb2.IdClaim, box: _Box) -> None:
        """As `LiveRequests.check_room`: not for an id that is live, which is about to be replaced."""
        answer = shards_pb2.IdAnswer(number=asked.number)
        if self._ledger is not None and not self.ids.find(asked.request_id, asked.tenant):
            try:
                self._ledger.check(asked.tenant, asked.num_bytes, time.monotonic())
            except OverLimit as over:
                answer.over_limit.CopyFrom(encode_over_limit(over))
        box.put(shards_pb2.FrontAnswer(id=answer))

    def _admit(self, claim: shards_pb2.IdClaim, box: _Box) -> None:
        """Answers a claim whose id is free, at once or when its tenant may run it."""
        answer = shards_pb2.IdAnswer(number=claim.number)
        if self._ledger is not None:
            ask = Ask(claim.tenant, claim.num_prompt_tokens, claim.num_sequences, claim.num_bytes)
            try:
                if not self._ledger.admit((box, claim.number), ask, time.monotonic()):
                    return
            except OverLimit as over:
                answer.over_limit.CopyFrom(encode_over_limit(over))
            except InvalidRequest as invalid:
                answer.too_many_sequences = invalid.violations[0].description
        if answer.HasField("over_limit") or answer.too_many_sequences:
            self.ids.release(box, claim.number)
        box.put(shards_pb2.FrontAnswer(id=answer))

    def _answer_held(self, claims: Iterable[tuple[_Box, int]]) -> None:
        for box, number in claims:
            self._answer(box, number, is_taken=False)

    @staticmethod
    def _answer(box: _Box, number: int, *, is_taken: bool) -> None:
        box.put(shards_pb2.FrontAnswer(id=shards_pb2.IdAnswer(number=number, is_taken=is_taken)))
