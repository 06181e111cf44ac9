"""One request's way out: tokens in, `GenerateResponse` messages out, text and stop strings decided in between.

Made by the frontend, then fed on the output thread. Knows nothing of schedulers beyond the group's own counters, and
nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protos import inference_pb2 as pb
from scheduler_svc.detokenizer import Detokenizer
from scheduler_svc.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.tokenizer import Tokenizer


class RequestStream:
    """What one client reads.

    Args:
        streams: False gathers everything into one final message.
        finish_sequence: called when a stop string ends a sequence that still has steps in flight.
    """

    def __init__(
        self,
        group: SequenceGroup,
        tokenizer: Tokenizer,
        model: str,
        *,
        streams: bool,
        returns_prompt: bool,
        finish_sequence: Callable[[Sequence], None],
    ) -> None:
        self.group = group
        self.streams = streams
        self.is_finished = False
        self._finish_sequence = finish_sequence
        self._first_token_ns: int | None = None
        self._outputs = [OutputStream(sequence, tokenizer) for sequence in group.sequences]
        self._head = pb.GenerateResponse(
            request_id=group.request_id,
            seed=group.sampling_params.seed,
            model=model,
            admission=pb.Admission(num_prompt_tokens=group.num_prompt_tokens),
            prompt_token_ids=group.sequences[0].token_ids.tolist() if returns_prompt else [],
        )
        self._gathered: list[pb.OutputDelta] = []

    def admission(self) -> pb.GenerateResponse | None:
        """The first message, unless all of them are gathered into one."""
        return self._head if self.streams else None

    def take(
        self, sequence: Sequence, token_id: int, reason: int, logprobs: pb.TokenLogprobs | None
    ) -> pb.GenerateResponse | None:
        """One token; `reason` where it ended the sequence."""
        if self._first_token_ns is None:
            self._first_token_ns = time.monotonic_ns()
        output = self._outputs[sequence.index]
        if output.is_finished:
            return None  # drawn by a step in flight when a stop string was found
        delta = output.take(token_id, reason, logprobs)
        if delta.finish_reason and not reason:
            self._finish_sequence(sequence)
        return self._message([delta])

    def end(self, reason: FinishReason, message: str) -> pb.GenerateResponse | None:
        """Ends every output that has not ended."""
        return self._message([output.end(reason, message) for output in self._outputs if not output.is_finished])

    def fail(self) -> pb.GenerateResponse | None:
        """Ends the request after a fault of our own in making its output."""
        for sequence in self.group.sequences:
            self._finish_sequence(sequence)
        return self._message([output.fail() for output in self._outputs if not output.is_finished])

    def _message(self, deltas: list[pb.OutputDelta]) -> pb.GenerateResponse | None:
        if self.is_finished:
            return None
        self.is_finished = all(output.is_finished for output in self._outputs)
        if not self.streams:
            self._gathered += deltas
            if not self.is_finished:
                return None
            deltas = _merge(self._gathered)
        response = pb.GenerateResponse(outputs=deltas)
        if not self.streams:
            response.MergeFrom(self._head)
        if self.is_finished:
            self._add_summary(response)
        return response

    def _add_summary(self, response: pb.GenerateResponse) -> None:
        group, now_ns = self.group, time.monotonic_ns()
        response.usage.prompt_tokens = group.num_prompt_tokens
        response.usage.completion_tokens = sum(output.num_tokens for output in self._outputs)
        response.usage.cached_tokens = 0
        timings = response.timings
        timings.queue_ns = (group.first_scheduled_ns or now_ns) - group.arrival_ns
        timings.first_token_ns = (self._first_token_ns or now_ns) - group.arrival_ns
        timings.total_ns = now_ns - group.arrival_ns
        timings.times_preempted, timings.times_moved = group.num_preemptions, group.num_moves


class OutputStream:
    """One sequence's tokens as text."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = sequence.group.sampling_params
        self.index = sequence.index
        self.is_finished = False
        self.num_tokens = 0
        self._cumulative_logprob = 0.0
        self._wants_logprobs = params.HasField("logprobs")
        self._detokenizer: Detokenizer | None = None
        if not params.HasField("detokenize") or params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=not params.HasField("skip_special_tokens") or params.skip_special_tokens,
                stop=list(params.stop),
                include_stop_str_in_output=params.include_stop_str_in_output,
            )

    def take(self, token_id: int, reason: int, logprobs: pb.TokenLogprobs | None) -> pb.OutputDelta:
        delta = pb.OutputDelta(index=self.index, token_ids=[token_id])
        self.num_tokens += 1
        if logprobs is not None:
            delta.logprobs.append(logprobs)
            self._cumulative_logprob += logprobs.token.logprob
        is_stop_token = reason == FinishReason.STOP
        if self._detokenizer is not None:
            shown = self._detokenizer.update([token_id], ended_by_stop_token=is_stop_token)
            delta.text = shown.text
            if shown.matched_stop is not None:
                delta.matched_stop.text = shown.matched_stop
                return self._finish(delta, FinishReason.STOP)
        if not reason:
            return delta
        if is_stop_token:
            delta.matched_stop.token_id = token_id
        return self._flush(delta, FinishReason(reason))

    def end(self, reason: FinishReason, message: str) -> pb.OutputDelta:
        """Ends the output from outside: aborted, or failed with a message."""
        delta = pb.OutputDelta(index=self.index)
        if reason is FinishReason.ERROR:
            delta.error.code, delta.error.message, delta.error.retryable = "INTERNAL", message, True
        return self._flush(delta, reason)

    def fail(self) -> pb.OutputDelta:
        """Ends the output without another look at its text, which may be what failed."""
        error = pb.OutputError(code="INTERNAL", message="the output could not be made; the server's log says why")
        return self._finish(pb.OutputDelta(index=self.index, error=error), FinishReason.ERROR)

    def _flush(self, delta: pb.OutputDelta, reason: FinishReason) -> pb.OutputDelta:
        """Text held back as the possible begin of a stop string, or as half a character, is text after all."""
        if self._detokenizer is not None:
            rest = self._detokenizer.finish()
            delta.text += rest.text
            if rest.matched_stop is not None and reason is FinishReason.LENGTH:
                delta.matched_stop.text, reason = rest.matched_stop, FinishReason.STOP
        return self._finish(delta, reason)

    def _finish(self, delta: pb.OutputDelta, reason: FinishReason) -> pb.OutputDelta:
        self.is_finished = True
        delta.finish_reason = reason.value
        if self._wants_logprobs:
            delta.cumulative_logprob = self._cumulative_logprob
        return delta


def _merge(deltas: list[pb.OutputDelta]) -> list[pb.OutputDelta]:
    """All deltas of each output as one."""
    merged: dict[int, pb.OutputDelta] = {}
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        texts.setdefault(delta.index, []).append(delta.text)
        merged.setdefault(delta.index, pb.OutputDelta()).MergeFrom(delta)
    for index, delta in merged.items():
        delta.text = "".join(texts[index])
    return [merged[index] for index in sorted(merged)]
