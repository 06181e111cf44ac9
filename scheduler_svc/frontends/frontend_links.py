"""The core's side of its frontend processes: their requests in, tokens and ends out.

A frontend that is lost takes its requests along, and no others. Knows nothing of how the processes are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from octavo.shared import log as logging
from octavo.shared.tracing.context import parse
from protos import frontend_pb2, worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.engine_core import EngineCore
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.errors import NotReady, RequestRefused
from scheduler_svc.frontends.frontend_messages import (
    decode_refusal,
    encode_beams,
    encode_counters,
    encode_end,
    encode_refusal,
    encode_tokens,
)
from scheduler_svc.frontends.outbox import Outbox
from scheduler_svc.frontends.prepared_group import decode_group
from scheduler_svc.serving import Serving
from scheduler_svc.tracing.group_trace import GroupTrace

log = structlog.get_logger()


class FrontendLinks:
    """An `OutputSink` that sends each frontend what belongs to its requests, one event a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._links: set[FrontendLink] = set()
        self._state = frontend_pb2.CoreState()

    # ---- OutputSink, called on the step loop's thread ---------------------------------------------------------------

    def start(self) -> None:
        """Nothing to start: the loop runs."""

    def stop(self) -> None:
        """Nothing to stop."""

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """To the one frontend that has the group."""
        self._soon(_send_prompt_logprobs, group, logprobs)

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """Each frontend gets those of its own requests, in one event."""
        self._soon(_send_tokens, tokens, outputs)

    def put_beams(self, group: SequenceGroup, hypotheses: AbstractSequence[BeamHypothesis]) -> None:
        """To the one frontend that has the group."""
        self._soon(_send_beams, group, hypotheses)

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """To the one frontend that has the group."""
        self._soon(_send_end, group, reason, message, is_invalid)

    def _soon(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def set_state(self, state: frontend_pb2.CoreState) -> None:
        """Tells every frontend there is, and each that comes."""
        self._state = state
        for link in self._links:
            link.outbox.put(frontend_pb2.CoreEvent(state=state))

    def connected(self) -> list[FrontendLink]:
        """Those whose stream is open now."""
        return list(self._links)

    def add(self, link: FrontendLink) -> None:
        """A frontend has connected: it is told the core's state first."""
        self._links.add(link)
        link.outbox.put(frontend_pb2.CoreEvent(state=self._state))

    def remove(self, link: FrontendLink) -> None:
        """A frontend is gone, and nobody reads its requests any more."""
        self._links.discard(link)
        link.outbox.close()
        link.abandon_all()

    def close(self) -> None:
        """Ends each frontend's stream after what is on its way."""
        for link in self._links:
            link.outbox.close()


class FrontendLink:
    """One connected frontend and its requests, by the numbers that it gave them."""

    def __init__(self, serving: Serving) -> None:
        self.outbox: Outbox[frontend_pb2.CoreEvent] = Outbox()
        self._core = EngineCore(serving.engine)
        self._serving = serving
        self._groups: dict[int, SequenceGroup] = {}
        self._submissions: dict[int, asyncio.Task[None]] = {}
        self._last_number = 0

    @property
    def last_settled_number(self) -> int:
        """The groups up to it have been given to the engine, or were refused; numbers rise."""
        return min(self._submissions, default=self._last_number + 1) - 1

    def waiting_numbers(self, limit: int) -> bytes:
        """As u32, of groups that have not begun, the latest first; only of so many as are looked at in no time."""
        latest = itertools.islice(reversed(self._groups.items()), 8 * limit)
        waiting = [number for number, group in latest if group.first_scheduled_ns is None and not group.is_finished]
        return np.array(waiting[:limit], "<u4").tobytes()

    def take(self, event: frontend_pb2.FrontendEvent) -> None:
        """One event of the frontend, on the event loop's thread."""
        kind = event.WhichOneof("kind")
        if kind == "group":
            number = self._last_number = event.group.number
            self._submissions[number] = asyncio.create_task(self._submit(number, event.group))
        elif kind == "sequence_end":
            self._finish_sequence(event.sequence_end)
        elif kind == "aborted":
            self._abort(event.aborted.number)
        elif kind == "closed":
            self._abandon(event.closed.number, is_moved=event.closed.is_moved)
        elif kind == "refused":
            refusal = decode_refusal(event.refused)
            assert isinstance(refusal, RequestRefused)
            self._core.refused(refusal)
        elif kind == "echo":
            self.outbox.put(frontend_pb2.CoreEvent(echo=True))
        elif kind == "listening":
            log.info("frontend is listening", pid=event.listening.pid)

    def send_tokens(self, tokens: NewTokens, entries: Ints, outputs: worker_pb2.SequenceOutputs) -> None:
        """`entries`: which of the answer's tokens are for requests of this frontend."""
        remotes: list[RemoteOutput] = [sequence.group.output for sequence in tokens.sequences[entries]]
        logprobs = None
        if any(remote.reads_logprobs for remote in remotes):
            with contextlib.suppress(IndexError):  # an answer without them: their streams end for want of them
                logprobs = LogprobColumns(outputs).select(tokens.entries[entries])
        columns = encode_tokens((remote.number for remote in remotes), tokens, entries, logprobs)
        columns.counters.extend(changed for remote in remotes if (changed := remote.changed_counters()) is not None)
        self.outbox.put(frontend_pb2.CoreEvent(tokens=columns))

    def abandon_all(self) -> None:
        """Nobody reads what the frontend has submitted, admitted or not."""
        for number in {**self._submissions, **self._groups}:
            self._abandon(number)

    async def _submit(self, number: int, prepared: frontend_pb2.PreparedGroup) -> None:
        try:
            model = self._serving.pool.models.find(prepared.model_fingerprint)
            if model is None:
                raise NotReady("its model is not served here any more; try again")
            group = self._groups[number] = decode_group(prepared, model.vocab_size)
            group.output = RemoteOutput(self, number, group, prepared.reads_logprobs)
            if prepared.traceparent:
                self._trace(group, prepared)
            await self._core.submit(group, replaces=prepared.replaces)
            self.outbox.put(frontend_pb2.CoreEvent(admitted=frontend_pb2.Admitted(number=number)))
        except Exception as error:
            if not isinstance(error, RequestRefused):
                log.error("request failed", request_id=prepared.request_id, exception=logging.trace(error))
            self._groups.pop(number, None)
            self.outbox.put(frontend_pb2.CoreEvent(refused=encode_refusal(number, error)))
        finally:
            self._submissions.pop(number, None)

    def _trace(self, group: SequenceGroup, prepared: frontend_pb2.PreparedGroup) -> None:
        tracer, context = self._serving.tracer, parse(prepared.traceparent, prepared.tracestate)
        if tracer is not None and context is not None:
            group.trace = GroupTrace(context, tracer.emit)

    def _finish_sequence(self, end: frontend_pb2.SequenceEnd) -> None:
        group = self._groups.get(end.number)
        for sequence in group.sequences if group is not None else ():
            if sequence.index == end.index:
                self._serving.engine.finish_sequence(sequence)

    def _abort(self, number: int) -> None:
        if (submission := self._submissions.get(number)) is not None:
            submission.add_done_callback(lambda _: self._abort(number))  # it may not have begun
        elif (group := self._groups.get(number)) is not None:
            self._serving.engine.abort_group(group)

    def _abandon(self, number: int, *, is_moved: bool = False) -> None:
        if (submission := self._submissions.pop(number, None)) is not None:
            submission.cancel()
        if (group := self._groups.pop(number, None)) is not None:
            group.goes_on_elsewhere = is_moved
            self._core.abandon(group)


@dataclass(slots=True)
class RemoteOutput:
    """What a group has as its `output` here: whose it is, and which of its counters that frontend has been told."""

    link: FrontendLink
    number: int
    group: SequenceGroup
    reads_logprobs: bool
    told: frontend_pb2.GroupCounters | None = None

    def changed_counters(self) -> frontend_pb2.GroupCounters | None:
        """None: they are what they were when last asked."""
        group, told = self.group, self.told
        if told is not None and (told.num_preemptions, told.num_moves) == (group.num_preemptions, group.num_moves):
            return None  # the others are set before its first token
        self.told = encode_counters(self.number, group)
        return self.told


def _send_prompt_logprobs(group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
    remote: RemoteOutput = group.output
    event = frontend_pb2.GroupPromptLogprobs(number=remote.number, logprobs=logprobs)
    remote.link.outbox.put(frontend_pb2.CoreEvent(prompt_logprobs=event))


def _send_tokens(tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
    entries: dict[FrontendLink, list[int]] = {}
    for entry, sequence in enumerate(tokens.sequences.tolist()):
        entries.setdefault(sequence.group.output.link, []).append(entry)
    for link, chosen in entries.items():
        link.send_tokens(tokens, np.array(chosen), outputs)


def _send_beams(group: SequenceGroup, hypotheses: AbstractSequence[BeamHypothesis]) -> None:
    remote: RemoteOutput = group.output
    beams = encode_beams(remote.number, group, hypotheses)
    remote.link.outbox.put(frontend_pb2.CoreEvent(beams=beams))


def _send_end(group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
    remote: RemoteOutput = group.output
    end = encode_end(remote.number, group, reason, message, is_invalid)
    remote.link.outbox.put(frontend_pb2.CoreEvent(end=end))
