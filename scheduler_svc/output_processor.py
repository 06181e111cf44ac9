"""The output thread: detokenises what the step loop appended, off the step loop and off the event loop.

Messages made from one answer are delivered together, so that the receiving side is woken once a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import structlog

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.request_stream import RequestStream
from scheduler_svc.sequence import FinishReason, SequenceGroup
from scheduler_svc.step_plan import NewTokens

log = structlog.get_logger()

Delivery = list[tuple[RequestStream, pb.GenerateResponse]]


class OutputProcessor:
    """An `OutputSink`. `deliver` is called on the output thread with what one answer, or one end, gave."""

    def __init__(self, deliver: Callable[[Delivery], None], token_text: Callable[[int], str]) -> None:
        self._deliver = deliver
        self._token_text = token_text
        self._queue: queue.SimpleQueue[Callable[[], Delivery] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        self._queue.put(lambda: self._take_tokens(tokens, outputs))

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str) -> None:
        self._queue.put(lambda: self._take_end(group, reason, message))

    def run_pending(self) -> None:
        """Makes and delivers what is there, for a caller who has not started the thread."""
        while not self._queue.empty():
            self._work(self._queue.get())

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._work(work)

    def _work(self, work: Callable[[], Delivery] | None) -> None:
        try:
            if work is not None and (delivery := work()):
                self._deliver(delivery)
        except Exception:
            log.exception("the output thread failed")

    def _take_end(self, group: SequenceGroup, reason: FinishReason, message: str) -> Delivery:
        stream: RequestStream = group.output
        try:
            return _keep(stream, stream.end(reason, message))
        except Exception:
            log.exception("output failed", request_id=group.request_id)
            return _keep(stream, stream.fail())

    def _take_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> Delivery:
        delivery: Delivery = []
        logprobs: LogprobColumns | None = None
        columns = (tokens.sequences, tokens.token_ids.tolist(), tokens.entries.tolist(), tokens.finish_reasons.tolist())
        for sequence, token_id, entry, reason in zip(*columns, strict=True):
            stream: RequestStream = sequence.group.output
            wanted = sequence.group.sampling_params
            try:
                at_token = None
                if wanted.HasField("logprobs"):
                    logprobs = logprobs or LogprobColumns(outputs, self._token_text)
                    at_token = logprobs.at(entry, wanted.logprobs)
                delivery += _keep(stream, stream.take(sequence, token_id, reason, at_token))
            except Exception:
                log.exception("output failed", request_id=sequence.group.request_id)
                delivery += _keep(stream, stream.fail())
        return delivery


class LogprobColumns:
    """The logprob columns of one answer, by entry of its token ids."""

    def __init__(self, outputs: worker_pb2.SequenceOutputs, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._token_ids = np.frombuffer(outputs.token_ids_i32, "<i4")
        self._logprobs = np.frombuffer(outputs.logprobs_f32, "<f4")
        self._ranks = np.frombuffer(outputs.ranks_u32, "<u4")
        counts = np.frombuffer(outputs.top_counts_u32, "<u4").astype(np.int64)
        self._top_ends = np.cumsum(counts) if len(counts) else np.zeros(len(self._token_ids), np.int64)
        self._top_token_ids = np.frombuffer(outputs.top_token_ids_i32, "<i4")
        self._top_logprobs = np.frombuffer(outputs.top_logprobs_f32, "<f4")

    def at(self, entry: int, num_top: int) -> pb.TokenLogprobs:
        first = int(self._top_ends[entry - 1]) if entry else 0
        last = min(int(self._top_ends[entry]), first + num_top)
        return pb.TokenLogprobs(
            token=self._logprob(self._token_ids[entry], self._logprobs[entry], self._ranks[entry]),
            top=[
                self._logprob(self._top_token_ids[i], self._top_logprobs[i], i - first + 1) for i in range(first, last)
            ],
        )

    def _logprob(self, token_id: np.integer, logprob: np.floating, rank: int | np.integer) -> pb.Logprob:
        text = self._token_text(int(token_id))
        return pb.Logprob(token_id=int(token_id), logprob=float(logprob), rank=int(rank), text=text)


def _keep(stream: RequestStream, response: pb.GenerateResponse | None) -> Delivery:
    return [] if response is None else [(stream, response)]
