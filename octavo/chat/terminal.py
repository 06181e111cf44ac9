"""Text between a model and a terminal: a prompt that may come through a pipe, an answer that appears as it is made."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.cli import CommandError
from octavo.shared.options import OptionError
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    from octavo.outputs import CompletionOutput, RequestOutput


def read_prompt(given: str | None) -> str | None:
    """The argument, or all of standard input when it is `-` or a pipe; None when there is only a terminal.

    Raises OptionError for bytes that are no text.
    """
    if given is None and sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read().rstrip("\n") if given is None or given == "-" else given
        text.encode()  # what could not be read may have come as halves of surrogate pairs
    except UnicodeError:
        raise OptionError("the prompt is no text in UTF-8: `iconv -t UTF-8 -f ENCODING` makes it some") from None
    return text


def print_json(output: RequestOutput) -> int:
    """Exit code 1 where an output did not end by itself; its error is among what is printed."""
    value = dataclasses.asdict(output)
    try:
        say(json.dumps(value, ensure_ascii=False))
    except UnicodeEncodeError:  # a terminal may not have every character
        print(json.dumps(value))
    return int(any(each.finish_reason in ("error", "abort") for each in output.outputs))


class Answer:
    """Prints output 0 of a stream as it arrives, and knows what was printed."""

    def __init__(self) -> None:
        self.text = ""
        self._started_s = time.monotonic()
        self._last: RequestOutput | None = None

    def show(self, stream: Iterator[RequestOutput]) -> None:
        """Raises CommandError when the request did not end by itself."""
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not have every character
        failure = None
        try:
            for output in stream:
                self._last = output
                for part in output.outputs:
                    self._take(part)
                    if part.finish_reason in ("error", "abort"):
                        failure = part.error or "the request was aborted"
        finally:
            if self.text and not self.text.endswith("\n"):
                print(flush=True)
        if failure:
            raise CommandError(failure)

    def _take(self, part: CompletionOutput) -> None:
        self._print(part.text)

    def _print(self, text: str) -> None:
        self.text += text
        say(text, end="")

    def figures(self) -> str:
        """One line: tokens, seconds, speed."""
        if self._last is None:
            return "no answer"
        metrics, total_s = self._last.metrics, time.monotonic() - self._started_s
        count, taken = metrics.num_output_tokens, f"{metrics.num_prompt_tokens} tokens in"
        first_ns = metrics.first_token_ns
        if first_ns is None or (count > 1 and len(metrics.token_times_ns) < 2):  # all at once, as beams come
            speed = f", {count / total_s:.1f} tokens/s" if count else ""
            return f"{taken}, {count} out after {total_s:.2f} s{speed}"
        first_s = (first_ns - metrics.arrival_ns) / 1e9
        speed = f", then {(count - 1) / (total_s - first_s):.1f} tokens/s" if count > 1 else ""
        return f"{taken}, {count} out; first after {first_s:.2f} s{speed}"


class Answers(Answer):
    """Prints several outputs one after the other, under headings `[1]`, `[2]`, ...; a beam's has its score.

    One output streams at a time; what comes of those after it waits until it has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, list[CompletionOutput]] = {}  # by output index
        self._index = 0  # of the output that streams
        self._has_heading = False

    def _take(self, part: CompletionOutput) -> None:
        self._waiting.setdefault(part.index, []).append(part)
        while parts := self._waiting.pop(self._index, None):
            for each in parts:
                self._print_part(each)
            if parts[-1].finish_reason is None:
                break
            self._index, self._has_heading = self._index + 1, False

    def _print_part(self, part: CompletionOutput) -> None:
        if not self._has_heading:
            above = "" if not self.text else "\n" if self.text.endswith("\n") else "\n\n"
            score = "" if part.score is None else f" score {part.score:.4f}"
            self._print(f"{above}[{part.index + 1}]{score}\n")
            self._has_heading = True
        self._print(part.text)
