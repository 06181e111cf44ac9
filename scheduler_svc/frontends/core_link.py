"""A frontend process's side of the core: a `Core` whose engine is in another process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc

from protos import frontend_pb2, frontend_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.errors import NotReady, RequestRefused
from scheduler_svc.frontends.forwarding import answer_of
from scheduler_svc.frontends.frontend_messages import (
    apply_counters,
    decode_beams,
    decode_refusal,
    decode_tokens,
    encode_refusal,
)
from scheduler_svc.frontends.outbox import Outbox
from scheduler_svc.frontends.prepared_group import encode_group
from scheduler_svc.limits.over_limit import OverLimit
from scheduler_svc.limits.refused_tenants import RefusedTenants
from scheduler_svc.models.model_description import decode_model, decode_model_with, decode_models
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.output_processor import take_beams, take_end, take_tokens

GONE = "this server is shutting down"

LONGEST_TAKING_S = 0.005  # without a pause for writing; longer than writing has in a round: who is behind catches up

StateListener = Callable[[frontend_pb2.CoreState], Awaitable[None]]


class CoreLink:
    """Sends groups to the core and rings `mailboxes` for what it says of them. For one event loop's thread.

    Attributes:
        models: none until the core has told.
    """

    def __init__(self, channel: grpc.aio.Channel, mailboxes: Mailboxes) -> None:
        self.models = ServedModels()
        self._stub = frontend_pb2_grpc.CoreStub(channel)
        self._mailboxes = mailboxes
        self._outbox: Outbox[frontend_pb2.FrontendEvent] = Outbox()
        self._last_number = 0
        self._numbers: dict[SequenceGroup, int] = {}
        self._groups: dict[int, SequenceGroup] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._echoes: deque[asyncio.Future[None]] = deque()  # that have yet to come back
        self._descriptions = frontend_pb2.ServedModels()
        self._is_queue_full = False  # when the core last said anything
        self._refused_tenants = RefusedTenants()
        self._is_closed = False

    async def follow(self, on_state: StateListener) -> None:
        """Takes what the core says until it closes the link, in order. Raises AioRpcError where it breaks."""
        loop = asyncio.get_running_loop()
        call, yielded_s = self._stub.Connect(self._messages()), loop.time()
        try:
            async for message in call:
                self._is_queue_full = message.is_queue_full
                for event in message.events:
                    if event.HasField("state"):
                        await self._take_state(event.state)
                        await on_state(event.state)
                    else:
                        self._take(event)
                    if loop.time() - yielded_s > LONGEST_TAKING_S:
                        await asyncio.sleep(0)
                        yielded_s = loop.time()
        finally:
            call.cancel()  # where this task is; does nothing to a call that has ended
            self._is_closed = True
            for answer in (*self._answers.values(), *self._echoes):
                if not answer.done():
                    answer.set_exception(NotReady(GONE))

    def unfinished(self) -> list[SequenceGroup]:
        """Groups that the core has taken and not ended, as far as it has said."""
        groups = {number: group for number, group in self._groups.items() if not group.output.is_finished}
        return [group for number, group in groups.items() if self._is_taken(number)]

    def group(self, number: int) -> SequenceGroup | None:
        """One that was sent under this number, as long as somebody reads it."""
        return self._groups.get(number)

    def _is_taken(self, number: int) -> bool:
        answer = self._answers.get(number)  # which is there until whoever submitted has looked at it
        return answer is None or (answer.done() and not answer.cancelled() and answer.exception() is None)

    def say_listening(self, pid: int) -> None:
        """Tells the core that clients can connect; `pid`: this process."""
        self._outbox.put(frontend_pb2.FrontendEvent(listening=frontend_pb2.Listening(pid=pid)))

    # ---- Core -------------------------------------------------------------------------------------------------------

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        """Asks the core only while its queue is full, as it tells with every message, or while it would refuse the
        tenant by what it said last."""
        if self._is_queue_full or request.tenant in self._refused_tenants:
            asked = frontend_pb2.CheckRoomRequest(
                tenant=request.tenant,
                request_id=request.request_id,
                num_preparing=num_preparing,
                num_bytes=num_bytes,
            )
            response: frontend_pb2.CheckRoomResponse = await answer_of(self._stub.CheckRoom(asked))
            if response.HasField("refused"):
                raise decode_refusal(response.refused)

    def refused(self, refusal: RequestRefused) -> None:
        """The core counts it; nobody waits for that."""
        self._outbox.put(frontend_pb2.FrontendEvent(refused=encode_refusal(0, refusal)))

    @property
    def is_closed(self) -> bool:
        """Whether the link is gone, for good."""
        return self._is_closed

    @property
    def is_queue_full(self) -> bool:
        """When the core last said anything."""
        return self._is_queue_full

    @property
    def next_number(self) -> int:
        """Of the group that is submitted next; numbers rise."""
        return self._last_number + 1

    async def submit(self, group: SequenceGroup, *, replaces: bool, is_moved: bool = False) -> None:
        """`is_moved`: another core has had it."""
        if self._is_closed:
            raise NotReady(GONE)
        number = self._numbers[group] = self._last_number = self.next_number
        self._groups[number] = group
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        prepared = encode_group(
            group, number, reads_logprobs=group.output.reads_logprobs, replaces=replaces, is_moved=is_moved
        )
        self._outbox.put(frontend_pb2.FrontendEvent(group=prepared))
        try:
            await answer
        except RequestRefused as refusal:
            del self._groups[self._numbers.pop(group)]
            if isinstance(refusal, OverLimit):
                self._refused_tenants.note(refusal)
            raise
        finally:
            del self._answers[number]

    def forget(self, group: SequenceGroup) -> None:
        """As `abandon`."""
        self.abandon(group)  # the core hears that it was, and that it has ended is nothing new to it

    def abandon(self, group: SequenceGroup, *, is_moved: bool = False) -> None:
        """Tells the core that nobody reads the group any more, or that another core goes on with it, where it
        `is_moved`; does nothing for one that it does not have."""
        if (number := self._numbers.pop(group, None)) is not None:
            del self._groups[number]
            closed = frontend_pb2.GroupClosed(number=number, is_moved=is_moved)
            self._outbox.put(frontend_pb2.FrontendEvent(closed=closed))

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """Asks the core, which knows the requests of all frontends."""
        response: pb.AbortResponse = await answer_of(
            self._stub.Abort(pb.AbortRequest(request_id=request_id, tenant=tenant))
        )
        return response.found

    def abort_group(self, group: SequenceGroup) -> None:
        """Has the core end it with ABORT; the end comes as any other does."""
        if (number := self._numbers.get(group)) is not None:
            self._outbox.put(frontend_pb2.FrontendEvent(aborted=frontend_pb2.GroupAborted(number=number)))

    async def adapters(self) -> list[str]:
        """Asks the core."""
        response: frontend_pb2.ListAdaptersResponse = await answer_of(
            self._stub.ListAdapters(frontend_pb2.ListAdaptersRequest())
        )
        return list(response.names)

    async def catch_up(self) -> None:
        """See `Core`: what comes back from the core now has all that it has told before it."""
        if self._is_closed:
            raise NotReady(GONE)
        echo = asyncio.get_running_loop().create_future()
        self._echoes.append(echo)
        self._outbox.put(frontend_pb2.FrontendEvent(echo=True))
        await echo

    def finish_sequence(self, sequence: Sequence) -> None:
        """The sequence's text is complete. Its request's id may be used again once the core has heard that."""
        if (number := self._numbers.get(sequence.group)) is not None:
            end = frontend_pb2.SequenceEnd(number=number, index=sequence.index)
            self._outbox.put(frontend_pb2.FrontendEvent(sequence_end=end))

    # ---- what the core says -----------------------------------------------------------------------------------------

    async def _messages(self) -> AsyncIterator[frontend_pb2.FrontendMessage]:
        async for events in self._outbox.batches():
            yield frontend_pb2.FrontendMessage(events=events)

    async def _take_state(self, state: frontend_pb2.CoreState) -> None:
        if state.models != self._descriptions:
            self.models = await asyncio.to_thread(self._decode, state.models)
            self._descriptions.CopyFrom(state.models)

    def _decode(self, message: frontend_pb2.ServedModels) -> ServedModels:
        """Reads the files of those tokenizers alone that are not there yet."""

        def decode(description: frontend_pb2.ModelDescription) -> ServedModel | None:
            model = self._find_model(description.fingerprint)
            if model is not None:
                return decode_model_with(description, model.tokenizer)
            if not Path(description.tokenizer_folder).exists():
                return None  # it was forgotten since this was written, which is about to be said
            return decode_model(description)

        return decode_models(message, decode)

    def _find_model(self, fingerprint: str) -> ServedModel | None:
        """One whose tokenizer is here."""
        return self.models.find(fingerprint)

    def _take(self, event: frontend_pb2.CoreEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "tokens":
            for counters in event.tokens.counters:
                self._apply(counters)
            self._take_tokens(decode_tokens(event.tokens, self._groups), event.tokens)
        elif kind == "prompt_logprobs":
            if (group := self._groups.get(event.prompt_logprobs.number)) is not None:
                self._mailboxes.take_prompt_logprobs(group, event.prompt_logprobs.logprobs)
        elif kind == "beams":
            if (group := self._apply(event.beams.counters)) is not None:
                self._mailboxes.ring(partial(take_beams, group, decode_beams(event.beams)))
        elif kind == "end":
            if (group := self._apply(event.end.counters)) is not None:
                reason, end = FinishReason(event.end.finish_reason), event.end
                self._mailboxes.ring(partial(take_end, group, reason, end.message, end.is_invalid))
        elif kind == "admitted":
            self._answer(event.admitted.number, None)
        elif kind == "echo":
            if not (echo := self._echoes.popleft()).done():  # or whoever waited has gone
                echo.set_result(None)
        elif kind == "refused":
            self._answer(event.refused.number, decode_refusal(event.refused))

    def _take_tokens(self, tokens: NewTokens, columns: frontend_pb2.TokenColumns) -> None:
        self._mailboxes.ring(partial(take_tokens, tokens, columns.logprobs, time.monotonic_ns()))

    def _answer(self, number: int, error: Exception | None) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():  # its client is gone
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _apply(self, counters: frontend_pb2.GroupCounters) -> SequenceGroup | None:
        """The group of these counters, which now has them; None where nobody reads it any more."""
        group = self._groups.get(counters.number)
        if group is not None:
            apply_counters(counters, group)
        return group
