"""Gives what the step loop hands out to the streams of its requests; for `LLM`, on a thread of its own.

The functions take one answer or one end, and return the streams that have a message ready. An output that raises ends,
and no other does.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from functools import partial

import structlog

from octavo.shared import log as logging
from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

PATIENCE_NS = 100_000_000  # after which the next tokens take along those that wait
Delivery = list[tuple[RequestStream, pb.GenerateResponse]]


def take_prompt_logprobs(group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
    """They go out with the first token. `make_prompt_logprobs` has to follow."""
    stream: RequestStream = group.output
    try:
        stream.take_prompt_logprobs(LogprobColumns(logprobs))
    except Exception as error:
        log.error("output failed", request_id=group.request_id, exception=logging.trace(error))
        stream.fail()


def make_prompt_logprobs(stream: RequestStream) -> bool:
    """A piece of what `take_prompt_logprobs` took; whether more are left."""
    try:
        return stream.make_prompt_logprobs()
    except Exception as error:
        log.error("output failed", request_id=stream.group.request_id, exception=logging.trace(error))
        stream.fail()
        return False


def take_tokens(tokens: NewTokens, outputs: worker_pb2.SequenceOutputs, came_ns: int) -> list[RequestStream]:
    """`came_ns`: when the answer arrived, for clients' timings."""
    ready: list[RequestStream] = []
    logprobs: LogprobColumns | None = None
    columns = (tokens.sequences.tolist(), tokens.token_ids.tolist(), tokens.entries.tolist(), tokens.finish_reasons)
    for sequence, token_id, entry, reason in zip(*columns[:3], columns[3].tolist(), strict=True):
        stream: RequestStream = sequence.group.output
        was_ready = stream.is_ready
        try:
            if stream.reads_logprobs:
                logprobs = logprobs or LogprobColumns(outputs)
                stream.take_logprobs(sequence, logprobs, entry)
            stream.take(sequence, token_id, reason, came_ns)
        except Exception as error:
            log.error("output failed", request_id=stream.group.request_id, exception=logging.trace(error))
            stream.fail()
        if stream.is_finished or (stream.is_ready and not was_ready):
            ready.append(stream)
    return ready


def take_beams(group: SequenceGroup, hypotheses: AbstractSequence[BeamHypothesis]) -> list[RequestStream]:
    """`hypotheses`: those to show, best first."""
    stream: RequestStream = group.output
    try:
        stream.take_beams(hypotheses)
    except Exception as error:
        log.error("output failed", request_id=group.request_id, exception=logging.trace(error))
        stream.fail()
    return [stream]


def take_end(group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool = False) -> list[RequestStream]:
    """All outputs of the group that have not ended end with `reason`; `is_invalid`: see `OutputSink`."""
    stream: RequestStream = group.output
    try:
        stream.end(reason, message, is_invalid)
    except Exception as error:
        log.error("output failed", request_id=group.request_id, exception=logging.trace(error))
        stream.fail()
    return [stream]


class OutputProcessor:
    """An `OutputSink` with a thread of its own: every stream's messages are made as soon as there is something to say.

    `deliver` is called on that thread, with the messages of one answer together, so that whoever takes them is woken
    once a step.

    Attributes:
        patience: how many tokens may wait for one another before outputs are made of them, as long as none ends a
            sequence and they are not `PATIENCE_NS` old. Above 1 where nobody reads along and no text is looked through
            for its end: the thread is then woken every so many tokens, not every step.
    """

    def __init__(self, deliver: Callable[[Delivery], None], vital: VitalParts | None = None) -> None:
        self.patience = 1
        self._deliver = deliver
        self._work: deque[Callable[[], list[RequestStream]]] = deque()
        self._num_waiting = 0  # tokens of the work since the bell was rung
        self._waits_since_ns = 0  # the first of them
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()  # there is work; False: and no more will come
        self._was_told_to_end = False
        self._thread = (vital or VitalParts()).thread("output", self._run, lambda: self._was_told_to_end)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Delivers what has come, and returns when the thread has ended."""
        self._was_told_to_end = True
        if self._thread.is_alive():
            self._bell.put(False)
            self._thread.join()

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """See `OutputSink`."""
        self._put(partial(_take_and_make_prompt_logprobs, group, logprobs))

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """See `OutputSink`; wakes the thread for an end, for `patience` tokens, or after PATIENCE_NS."""
        came_ns = time.monotonic_ns()
        self._work.append(partial(take_tokens, tokens, outputs, came_ns))
        if not self._num_waiting:
            self._waits_since_ns = came_ns
        self._num_waiting += len(tokens.sequences)
        is_late = came_ns - self._waits_since_ns >= PATIENCE_NS
        if is_late or self._num_waiting >= self.patience or tokens.finish_reasons.any():
            self._ring()

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        """See `OutputSink`."""
        self._put(partial(take_beams, group, hypotheses))

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """See `OutputSink`."""
        self._put(partial(take_end, group, reason, message, is_invalid))

    def run_pending(self) -> None:
        """Makes and delivers what is there, for a caller who has not started the thread."""
        while self._work:
            self._make(self._work.popleft())

    def _put(self, work: Callable[[], list[RequestStream]]) -> None:
        self._work.append(work)
        self._ring()

    def _ring(self) -> None:
        self._num_waiting = 0
        self._bell.put(True)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._bell.get()
            self.run_pending()

    def _make(self, work: Callable[[], list[RequestStream]]) -> None:
        try:
            streams = work()
            if delivery := [(stream, message) for stream in streams for message in iter(stream.next_message, None)]:
                self._deliver(delivery)
        except Exception as error:
            log.error("the output thread failed", exception=logging.trace(error))


def _take_and_make_prompt_logprobs(group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> list[RequestStream]:
    """On a thread that nobody else waits for."""
    take_prompt_logprobs(group, logprobs)
    while make_prompt_logprobs(group.output):
        pass
    return [group.output]
