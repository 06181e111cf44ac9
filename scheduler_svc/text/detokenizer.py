"""From the token ids of one output to the text that its client may see, and to the stop string that ends it.

The text released after k tokens is a function of the first k ids alone, whatever deltas they came in: half characters
and possible beginnings of stop strings are held back. So an output that resumes elsewhere feeds the tokens its client
has, throws that text away, and goes on with exactly the unreleased text. Only generated tokens are fed: a stop string
never matches in the prompt.

Byte tokens are held back while later ones may still change their text, but a stop string in them counts at once: it
ends the output, so no later ones come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.stop_strings import CheckedText, StopStrings
from scheduler_svc.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What some more ids of an output have brought."""

    text: str
    matched_stop: str | None  # the stop string that ended the output
    num_tokens: int  # of the ids given, those up to and with the one that completed the stop string


class Detokenizer:
    """One output's text. Not thread-safe: one thread at a time feeds it.

    `skip_special_tokens`: special tokens have no text. `continues_text`: see `Tokenizer.stream`. `stop`: of the
    request, shared by its outputs; None where it has no stop strings. `min_tokens`: a stop string counts only when it
    is completed by a later token than the first `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
        stop: StopAutomaton | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = tokenizer.stream(skip_special_tokens, continues_text=continues_text)
        self._stops = None if stop is None else StopStrings(stop, include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._early: list[str] = []  # what the stream holds back and no stop string may end in, as `min_tokens` says
        self._matched_stop: str | None = None

    def update(self, token_ids: Sequence[int], ended_by_stop_token: bool = False) -> TextDelta:
        """Feed the next ids. After a match nothing more is released, whatever is fed.

        `ended_by_stop_token`: the last of them is the EOS or stop token that ended the output. It has no text, even
        with special tokens shown, except with `include_stop_str_in_output`.
        """
        if self._matched_stop is not None:
            return TextDelta("", self._matched_stop, 0)
        shown_ids = token_ids[:-1] if ended_by_stop_token and not self._include_stop else token_ids
        if self._stops is None:
            return TextDelta(self._stream.push(shown_ids), None, len(token_ids))
        texts: list[str] = []
        for count, token_id in enumerate(shown_ids, start=1):
            self._num_tokens += 1
            text = self._stream.push((token_id,))
            if not text:
                if not self._completes_stop(self._stops, self._stream.peek()):
                    continue
                text = self._stream.finish()
            checked = self._check(self._stops, text)
            texts.append(checked.text)
            if checked.matched is not None:
                self._matched_stop = checked.matched
                return TextDelta("".join(texts), checked.matched, count)
        return TextDelta("".join(texts), None, len(token_ids))

    def finish(self) -> TextDelta:
        """The end for another reason than a stop string: everything held back, incomplete characters as U+FFFD.

        The text that was held back may complete a stop string, which is then reported and cuts it.
        """
        if self._matched_stop is not None:
            return TextDelta("", self._matched_stop, 0)
        rest = self._stream.finish()
        if self._stops is None:
            return TextDelta(rest, None, 0)
        checked = self._check(self._stops, rest)
        self._matched_stop = checked.matched
        if checked.matched is not None:
            return TextDelta(checked.text, checked.matched, 0)
        return TextDelta(checked.text + self._stops.finish(), None, 0)

    def _completes_stop(self, stops: StopStrings, peeked: str) -> bool:
        """`peeked`: whole characters of the last token's that the stream holds back."""
        if not peeked:
            return False
        may_match = self._num_tokens > self._min_tokens
        if not may_match:
            self._early.append(peeked)
        return stops.peek(peeked, may_match)

    def _check(self, stops: StopStrings, text: str) -> CheckedText:
        """`text`: what the stream has released with the last token, from its first held back character on."""
        may_match = self._num_tokens > self._min_tokens
        if not (self._early and text):
            return stops.push(text, may_match)
        early, self._early = "".join(self._early), []
        if not may_match or not text.startswith(early):  # it has become U+FFFD
            return stops.push(text, may_match)
        shown = stops.push(early, may_match=False).text
        checked = stops.push(text[len(early) :])
        return CheckedText(shown + checked.text, checked.matched)
