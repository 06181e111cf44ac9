"""One request's way out: tokens in, `GenerateResponse` messages out.

A frontend makes it. Tokens are taken as they come. A message is made when the reader wants one, of everything that is
new: a reader that falls behind finds one larger message, never a queue of them. Of schedulers it knows only the group's
own counters, and nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence

import structlog

from octavo.shared import log as logging
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.output.output_stream import OutputStream
from scheduler_svc.output.prompt_logprobs import PromptLogprobs
from scheduler_svc.output.resumed_outputs import ResumedOutput
from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.tokenizer import Tokenizer

log = structlog.get_logger()

MAX_ENTRIES_A_MESSAGE = 16_384  # tokens and alternatives: some 300 kB, where plain clients take 4 MiB
MAX_ENTRIES_AT_ONCE = 1 << 20  # of those who do not stream: 20 to 30 MB, where a server sends 64 MiB


class RequestStream:
    """What one client reads. Not thread-safe.

    With `best_of` > `n`, with beams and without streaming there is nothing to read before all outputs have ended; then
    come the n best, numbered by rank. Of `best_of` they are those with the highest cumulative logprob, ties to the
    lower index; what ended otherwise than with STOP or LENGTH comes last. The usage counts the tokens of all `best_of`.

    Args:
        streams: False gathers everything into one message, the admission included.
        continues_text: the outputs go on with the prompt's text: see `Tokenizer.stream`.
        finish_sequence: called when a stop string ends a sequence that still has steps in flight.

    Attributes:
        is_ready: `next_message` has something to give. Never while `make_prompt_logprobs` has to be called.
        is_finished: all outputs have ended; the message that says so may not have been made yet.
        reads_logprobs: `take_logprobs` has to come before each `take`.
        token_times_ns: when tokens of the first sequence came, noted where messages do not show it.
        told: gets each message as well, the admission apart.
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
        continues_text: bool = False,
    ) -> None:
        params = group.sampling_params
        self.group = group
        self.streams = streams
        self.is_ready = False
        self.is_finished = False
        self.token_times_ns: list[int] = []
        self.told: Callable[[pb.GenerateResponse], None] | None = None
        self._finish_sequence = finish_sequence
        self._resumed: AbstractSequence[ResumedOutput] = ()
        self._is_ranked = group.best_of > group.num_outputs and not group.uses_beam_search
        self._is_gathered = not streams or self._is_ranked or group.uses_beam_search
        num_entries = 1 + (params.logprobs if params.logprobs >= 0 else tokenizer.vocab_size)
        max_entries = MAX_ENTRIES_A_MESSAGE if streams else MAX_ENTRIES_AT_ONCE
        self._max_tokens_a_message = max(1, max_entries // num_entries)
        self.reads_logprobs = group.wants_logprobs
        num_outputs = group.num_outputs if group.uses_beam_search else group.best_of
        stops = StopAutomaton(params.stop) if params.stop else None
        self._outputs = [
            OutputStream(params, tokenizer, stops, continues_text=continues_text) for _ in range(num_outputs)
        ]
        self._num_unfinished = num_outputs
        self._num_beam_tokens = 0
        self._tokenizer = tokenizer
        self._prompt = self._new_prompt() if params.HasField("prompt_logprobs") else None  # until they are sent
        self._has_to_make_prompt = False
        self._first_token_ns: int | None = None
        self._head = pb.GenerateResponse(
            request_id=group.request_id,
            seed=params.seed,
            model=model,
            model_fingerprint=group.model,
            admission=pb.Admission(num_prompt_tokens=group.num_prompt_tokens),
            prompt_token_ids=group.sequences[0].token_ids[: group.num_prompt_tokens].tolist() if returns_prompt else [],
        )

    @property
    def num_tokens(self) -> int:
        """Taken so far, over all outputs; those of beams at the end."""
        return self._num_beam_tokens or sum(output.num_tokens for output in self._outputs)

    @property
    def model(self) -> str:
        """Its name, as the answer says it."""
        return self._head.model

    @property
    def first_token_ns(self) -> int | None:
        """When the first token came, on the monotonic clock."""
        return self._first_token_ns

    def finish_reasons(self) -> list[FinishReason]:
        """Of the outputs that the client gets, in its order; without those that have not ended."""
        return [FinishReason(output.finish_reason) for output in self._chosen() if output.finish_reason]

    def admission(self) -> pb.GenerateResponse | None:
        """The first message, unless all of them are gathered into one."""
        return self._head if self.streams else None

    def resume(self, outputs: AbstractSequence[ResumedOutput]) -> None:
        """What the client has already of each output, by index; `catch_up` has to follow."""
        self._resumed = outputs

    @property
    def is_behind(self) -> bool:
        """Whether the client has more than was taken here."""
        return bool(self._resumed)

    def catch_up(self) -> Iterator[None]:
        """Takes what the client has already; ended before anything else is taken. Raises InvalidRequest.

        Yields between pieces of the work, of which there may be seconds: whoever lost the client stops there.
        """
        if any(resumed.token_ids for resumed in self._resumed):
            self._prompt = None  # came with the first of them
        for index, resumed in enumerate(self._resumed):
            output = self._outputs[index]
            try:
                yield from output.resume(resumed.token_ids, resumed.finish_reason, resumed.is_told)
            except ValueError as error:
                raise InvalidRequest(FieldViolation("resume", f"output {index}: {error}")) from None
            if output.finish_reason:
                self._note_end()
                self.group.sequences[index].status = SequenceStatus.FINISHED
        self._resumed = ()
        self.is_ready = self.is_finished or any(output.has_news for output in self._outputs)

    def begins_anew_elsewhere(self) -> None:
        """Another worker computes the prompt again; its logprobs come again where no token came yet."""
        if self._prompt is not None and self._first_token_ns is None:
            self._prompt, self._has_to_make_prompt = self._new_prompt(), False

    def take_prompt_logprobs(self, columns: LogprobColumns) -> None:
        """Those of the next tokens of the prompt, all of which come before the first token.

        `make_prompt_logprobs` has to be called until it has made them all.
        """
        if self._prompt is not None and not self.is_finished:
            self._prompt.take(columns)
            self._has_to_make_prompt = not self._prompt.is_made

    def make_prompt_logprobs(self) -> bool:
        """Makes a piece of what goes out with the first token; whether more are left."""
        if self._has_to_make_prompt:
            assert self._prompt is not None
            self._prompt.make_piece()
            if self._prompt.is_made:
                self._has_to_make_prompt = False
                has_news = not self._is_gathered and any(output.has_news for output in self._outputs)
                self.is_ready = self.is_finished or has_news
        return self._has_to_make_prompt

    def take(self, sequence: Sequence, token_id: int, reason: int, came_ns: int) -> None:
        """One token; `reason` where it ended the sequence."""
        if self._first_token_ns is None:
            self._note_first_token(came_ns)
        if self._is_gathered and sequence.index == 0:
            self.token_times_ns.append(came_ns)
        output = self._outputs[sequence.index]
        if output.finish_reason:
            return  # drawn by a step in flight when a stop string was found
        output.take(token_id, reason)
        if output.finish_reason:
            self._note_end()
            if not reason:
                self._finish_sequence(sequence)
        elif not self._is_gathered:
            self.is_ready = not self._has_to_make_prompt

    def take_logprobs(self, sequence: Sequence, columns: LogprobColumns, entry: int) -> None:
        """Those of the sequence's next token."""
        output = self._outputs[sequence.index]
        if not output.finish_reason:
            output.take_logprobs(columns, entry)

    def take_beams(self, hypotheses: AbstractSequence[BeamHypothesis]) -> None:
        """All outputs at once, ranked."""
        self._num_beam_tokens = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
        self._note_first_token(time.monotonic_ns())
        for output, hypothesis in zip(self._outputs, hypotheses, strict=False):
            if not output.finish_reason:
                output.take_beam(hypothesis)
                self._note_end()
        self.end(FinishReason.ERROR, f"the search gave {len(hypotheses)} outputs of {len(self._outputs)}")

    def end(self, reason: FinishReason, message: str, is_invalid: bool = False) -> None:
        """Ends every output that has not ended; `is_invalid`: see `OutputSink`."""
        for output in self._outputs:
            if not output.finish_reason:
                output.end(reason, message, is_invalid)
                self._note_end()

    def fail(self) -> None:
        """Ends the request after a fault of our own in making its output."""
        for sequence in self.group.sequences:
            self._finish_sequence(sequence)
        if self._has_to_make_prompt or not self.is_finished:
            for output in self._outputs:
                output.fail()
            self._num_unfinished = 0
            self._prompt, self._has_to_make_prompt = None, False
            self.is_finished = self.is_ready = True

    def next_message(self) -> pb.GenerateResponse | None:
        """What is new, as one message, up to a size that any client takes; None when nothing is, or after the last one.

        Without streaming there is one message, and more only where one would be larger than a server sends.
        """
        if not self.is_ready:
            return None
        response = self._begin_message()
        room, chosen = self._max_tokens_a_message, self._chosen()
        for index, output in enumerate(chosen):
            if output.has_news and room > 0:
                delta = response.outputs.add()
                room -= self._write(output, delta, room)
                delta.index = index
        self.is_ready = room <= 0 and any(output.has_news for output in chosen)
        if self.is_finished and not self.is_ready:
            if not self.streams:
                response.MergeFrom(self._head)
            self._add_summary(response)
        if self.told is not None:
            self.told(response)
        return response

    def _note_first_token(self, came_ns: int) -> None:
        self._first_token_ns = came_ns
        if self._prompt is not None and self._prompt.num_taken != self.group.num_prompt_tokens:
            raise ValueError(f"a token came after {self._prompt.num_taken} logprobs of the prompt")

    def _note_end(self) -> None:
        self._num_unfinished -= 1
        self.is_finished = not self._num_unfinished
        self.is_ready = (self.is_finished or not self._is_gathered) and not self._has_to_make_prompt

    def _write(self, output: OutputStream, delta: pb.OutputDelta, max_tokens: int) -> int:
        try:
            return output.write(delta, max_tokens)
        except Exception as error:
            log.error("output failed", request_id=self.group.request_id, exception=logging.trace(error))
            if not output.finish_reason:
                self._note_end()
                self._finish_sequence(self.group.sequences[self._outputs.index(output)])
            output.fail()
            delta.Clear()
            return output.write(delta, max_tokens)

    def _new_prompt(self) -> PromptLogprobs:
        return PromptLogprobs(self.group.sampling_params.prompt_logprobs, self._tokenizer.token_text)

    def _begin_message(self) -> pb.GenerateResponse:
        """With the prompt's logprobs, once: whole or, of a request that ended before its first token, not at all."""
        prompt, self._prompt = self._prompt, None
        if prompt is None or prompt.num_taken != self.group.num_prompt_tokens:
            return pb.GenerateResponse()
        return prompt.message

    def _chosen(self) -> list[OutputStream]:
        """The outputs that the client gets, in its order."""
        if not self._is_ranked:
            return self._outputs
        return sorted(self._outputs, key=_rank)[: self.group.num_outputs]

    def _add_summary(self, response: pb.GenerateResponse) -> None:
        group, now_ns = self.group, time.monotonic_ns()
        response.usage.prompt_tokens = group.num_prompt_tokens
        response.usage.completion_tokens = self.num_tokens
        response.usage.cached_tokens = 0 if group.hides_cached_tokens else group.num_cached_tokens
        timings = response.timings
        timings.queue_ns = (group.first_scheduled_ns or now_ns) - group.arrival_ns
        timings.first_token_ns = (self._first_token_ns or now_ns) - group.arrival_ns
        timings.total_ns = now_ns - group.arrival_ns
        timings.times_preempted, timings.times_moved = group.num_preemptions, group.num_moves


def _rank(output: OutputStream) -> tuple[bool, float]:
    has_ended_well = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return not has_ended_well, -output.cumulative_logprob
