"""Stop strings in a text that arrives in parts, and what of that text may be shown before they are decided.

Which match counts does not depend on how the text is cut: of all matches in the whole text, the one that is complete
first; of those that are complete at the same character, the string that is listed first. (For "abcd" and "bc" in
"abcd", "bc" stops.) Text that may be the beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class CheckedText(NamedTuple):
    text: str  # what may be shown now
    matched: str | None  # the stop string that ended the text


class StopStrings:
    """The stop strings of one output. Not thread-safe.

    `strings`: none empty. `include_in_output`: the matched string is shown; then nothing needs to be held back.
    """

    def __init__(self, strings: Sequence[str], include_in_output: bool = False) -> None:
        self._strings = tuple(strings)
        self._include_in_output = include_in_output
        self._longest = max(map(len, self._strings), default=0)
        self._beginnings = re.compile("[" + "".join({re.escape(string[0]) for string in self._strings}) + "]")
        self._tail = ""  # the last characters of the text so far, enough to see a match that began in them
        self._num_held = 0  # of the tail's last characters: not shown yet

    def push(self, text: str, may_match: bool = True) -> CheckedText:
        """The next part of the text. Without `may_match` no match may end in it, though one may begin in it."""
        window = self._tail + text
        shown = len(self._tail) - self._num_held
        if may_match and (found := self._first_match(window)):
            start, end, string = found
            return CheckedText(window[shown : end if self._include_in_output else start], string)
        self._num_held = 0 if self._include_in_output else self._num_undecided(window)
        self._tail = window[max(0, len(window) - self._longest + 1) :]
        return CheckedText(window[shown : len(window) - self._num_held], None)

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _first_match(self, window: str) -> tuple[int, int, str] | None:
        """(start, end, string) of the match that ends first, among those that end in the new part of `window`."""
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = window.find(string, max(0, len(self._tail) - len(string) + 1))
            if start >= 0 and (best is None or start + len(string) < best[1]):
                best = start, start + len(string), string
        return best

    def _num_undecided(self, window: str) -> int:
        """Length of the longest end of `window` that is the beginning of a stop string, and not all of it."""
        first = max(0, len(window) - self._longest + 1)
        for candidate in self._beginnings.finditer(window, first):
            end = window[candidate.start() :]
            if any(len(end) < len(string) and string.startswith(end) for string in self._strings):
                return len(end)
        return 0
