"""One output's way to its client: tokens are taken one by one, and written as deltas whenever one is wanted.

However many tokens a delta brings, the deltas of an output put together are the same. Text is made when it is written,
all of it at once, and so are messages of logprobs; only an output with stop strings is looked at token by token, as one
of them may end it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns, LogprobsOfToken
from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.tokenizer import Tokenizer

TOKENS_A_PIECE = 256  # of those that a client has already: about 0.4 ms


class OutputStream:
    """Not thread-safe. Nothing may be taken after the end, and one delta is written after it.

    `stops`: the request's stop strings, None where it has none. `continues_text`: see `Tokenizer.stream`.

    Attributes:
        finish_reason: NONE until the output has ended.
        num_tokens: tokens taken, with the one that completed a stop string.
        cumulative_logprob: of the tokens whose logprobs were taken.
    """

    def __init__(
        self,
        params: pb.SamplingParams,
        tokenizer: Tokenizer,
        stops: StopAutomaton | None = None,
        *,
        continues_text: bool = False,
    ) -> None:
        self.finish_reason = FinishReason.NONE
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self._num_top_logprobs = params.logprobs if params.HasField("logprobs") else None
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []  # not written yet, like all that follows
        self._logprobs: list[LogprobsOfToken] = []
        self._texts: list[str] = []
        self._matched_stop: int | str | None = None
        self._error: pb.OutputError | None = None
        self._score: float | None = None
        self._has_written_end = False
        self._is_resumed = False
        self._knows_logprobs = params.HasField("logprobs")
        self._stop_token_ids = params.stop_token_ids
        self._has_stop_strings = stops is not None
        self._detokenizer: Detokenizer | None = None
        if not params.HasField("detokenize") or params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=not params.HasField("skip_special_tokens") or params.skip_special_tokens,
                continues_text=continues_text,
                stop=stops,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def has_news(self) -> bool:
        """Whether a delta written now would say anything."""
        return bool(self._token_ids or (self.finish_reason and not self._has_written_end))

    def take(self, token_id: int, reason: int) -> None:
        """The next token; `reason` where it ended the output. A stop string may end it as well."""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if self._has_stop_strings:
            self._look_for_stop(token_id, reason)
        if reason and not self.finish_reason:
            self.end(FinishReason(reason))

    def resume(self, token_ids: AbstractSequence[int], reason: FinishReason, is_told: bool) -> Iterator[None]:
        """Takes what the client has already: the tokens with all text that they released. Ended before all else.

        `reason`: how the output ended with the last of them, if it did; `is_told`: the client knows. Yields between
        pieces of the work. Raises ValueError for tokens after the one that completed a stop string.
        """
        self._is_resumed = bool(token_ids)
        self.num_tokens = len(token_ids)
        if is_told:
            self.finish_reason, self._has_written_end = reason, True
            return
        for first in range(0, len(token_ids), TOKENS_A_PIECE):
            piece = token_ids[first : first + TOKENS_A_PIECE]
            if self._has_stop_strings:
                self._resume_with_stops(piece, reason if first + len(piece) == len(token_ids) else FinishReason.NONE)
            elif self._detokenizer is not None and not reason:
                self._detokenizer.update(piece)
            if self.finish_reason and first + len(piece) < len(token_ids):
                raise ValueError(f"it goes on after {self._matched_stop!r}, which ends it")
            yield
        if reason and not self.finish_reason:
            self._token_ids = [token_ids[-1]]
            self.end(reason)
        if self.finish_reason:
            self._detokenizer = None
        self._token_ids, self._texts = [], []

    def _resume_with_stops(self, token_ids: AbstractSequence[int], reason: FinishReason) -> None:
        """One piece of them; `reason`: how the output ended with the last."""
        assert self._detokenizer is not None  # who wants no text has no stop strings
        shown = self._detokenizer.update(token_ids, ended_by_stop_token=reason == FinishReason.STOP)
        if shown.matched_stop is not None:
            self._matched_stop, self.finish_reason = shown.matched_stop, FinishReason.STOP
            if shown.num_tokens < len(token_ids):
                raise ValueError(f"it goes on after {self._matched_stop!r}, which ends it")

    def take_logprobs(self, columns: LogprobColumns, entry: int) -> None:
        """Those of the token that is taken next."""
        self._knows_logprobs = True
        self.cumulative_logprob += columns.logprob(entry)
        if self._num_top_logprobs is not None:
            self._logprobs.append(columns.of(entry, self._num_top_logprobs))

    def take_beam(self, beam: BeamHypothesis) -> None:
        """All of an output at once. A stop string cuts it; its score stays that of the whole hypothesis."""
        self._knows_logprobs = True
        tokens = zip(beam.token_ids, beam.logprobs, beam.ranks, strict=True)
        for position, (token_id, logprob, rank) in enumerate(tokens, start=1):
            self.cumulative_logprob += logprob
            if self._num_top_logprobs is not None:
                self._logprobs.append(LogprobsOfToken(token_id, logprob, rank))
            self.take(token_id, beam.finish_reason if position == len(beam.token_ids) else FinishReason.NONE)
            if self.finish_reason:
                break
        self._score = beam.score

    def end(self, reason: FinishReason, message: str = "", is_invalid: bool = False) -> None:
        """Ends the output: at its last token, or from outside, aborted or failed with a message.

        `is_invalid`: it failed because of what the request asks for.
        """
        self.finish_reason = reason
        if reason is FinishReason.STOP and self._token_ids[-1] in self._stop_token_ids:  # not the model's own end
            self._matched_stop = self._token_ids[-1]
        elif reason is FinishReason.ERROR:
            code = "INVALID_ARGUMENT" if is_invalid else "INTERNAL"
            self._error = pb.OutputError(code=code, message=message, retryable=not is_invalid)
        if self._has_stop_strings and self._detokenizer is not None:
            # What was held back as the possible begin of a stop string, or as half a character, is text after all.
            rest = self._detokenizer.finish()
            self._texts.append(rest.text)
            if rest.matched_stop is not None and reason in (FinishReason.LENGTH, FinishReason.STOP):
                self._matched_stop, self.finish_reason = rest.matched_stop, FinishReason.STOP

    def fail(self) -> None:
        """Ends the output, whatever it was going to say, without another look at its text, which may be what failed."""
        self.finish_reason = FinishReason.ERROR
        message = "the output could not be made; the server's log says why"
        self._error = pb.OutputError(code="INTERNAL", message=message)
        self._detokenizer = self._matched_stop = None
        self._token_ids, self._logprobs, self._texts = [], [], []

    def write(self, delta: pb.OutputDelta, max_tokens: int) -> int:
        """Puts what is new into `delta`, except its index; the end with the last tokens. How many tokens it took."""
        token_ids, self._token_ids = self._token_ids[:max_tokens], self._token_ids[max_tokens:]
        is_end = bool(self.finish_reason) and not self._token_ids
        delta.text = self._text_of(token_ids, is_end)
        delta.token_ids.extend(token_ids)
        if self._logprobs:
            text = self._tokenizer.token_text
            delta.logprobs.extend(each.message(text) for each in self._logprobs[:max_tokens])
            self._logprobs = self._logprobs[max_tokens:]
        if is_end:
            self._write_end(delta)
        return len(token_ids)

    def _look_for_stop(self, token_id: int, reason: int) -> None:
        assert self._detokenizer is not None  # who wants no text has no stop strings
        shown = self._detokenizer.update((token_id,), ended_by_stop_token=reason == FinishReason.STOP)
        self._texts.append(shown.text)
        if shown.matched_stop is not None:
            self._matched_stop, self.finish_reason = shown.matched_stop, FinishReason.STOP

    def _text_of(self, token_ids: list[int], is_end: bool) -> str:
        """Of the tokens that are written next; `is_end`: with them the output has ended."""
        if self._has_stop_strings:
            count = len(self._texts) if is_end else len(token_ids)  # at the end comes what was held back
            text, self._texts = "".join(self._texts[:count]), self._texts[count:]
            return text
        if self._detokenizer is None:
            return ""
        ended_by_stop_token = is_end and self.finish_reason is FinishReason.STOP
        text = self._detokenizer.update(token_ids, ended_by_stop_token).text
        return text + self._detokenizer.finish().text if is_end else text

    def _write_end(self, delta: pb.OutputDelta) -> None:
        self._has_written_end = True
        delta.finish_reason = self.finish_reason.value
        if isinstance(self._matched_stop, str):
            delta.matched_stop.text = self._matched_stop
        elif self._matched_stop is not None:
            delta.matched_stop.token_id = self._matched_stop
        if self._error is not None:
            delta.error.CopyFrom(self._error)
        if self._knows_logprobs and not self._is_resumed:  # those of resumed tokens are not known here
            delta.cumulative_logprob = self.cumulative_logprob
        if self._score is not None:
            delta.score = self._score
