"""Stop strings looked for in the plainest ways: the oracles of `StopStrings`."""

from __future__ import annotations

from collections.abc import Sequence


def naive_match(text: str, strings: Sequence[str], from_end: int = 1) -> tuple[int, int, str] | None:
    """Grow the text letter by letter; the first string of the list that ends it wins."""
    for end in range(from_end, len(text) + 1):
        for string in strings:
            if text[:end].endswith(string):
                return end - len(string), end, string
    return None


def naive_undecided(text: str, strings: Sequence[str]) -> int:
    lengths = [n for string in strings for n in range(1, len(string)) if text.endswith(string[:n])]
    return max(lengths, default=0)


class NaiveStopStrings:
    """`StopStrings` by searching the end of the text again and again, in quadratic time."""

    def __init__(self, strings: Sequence[str], include_in_output: bool) -> None:
        self._strings = tuple(strings)
        self._include_in_output = include_in_output
        self._longest = max(map(len, self._strings))
        self._tail = ""  # the last characters of the text so far, enough to see a match that began in them
        self._num_held = 0  # of the tail's last characters: not shown yet

    def push(self, text: str, may_match: bool) -> tuple[str, str | None]:
        window = self._tail + text
        shown = len(self._tail) - self._num_held
        if may_match and (found := self._first_match(window)):
            start, end, string = found
            return window[shown : end if self._include_in_output else start], string
        self._num_held = 0 if self._include_in_output else naive_undecided(window, self._strings)
        self._tail = window[max(0, len(window) - self._longest + 1) :]
        return window[shown : len(window) - self._num_held], None

    def finish(self) -> str:
        return self._tail[len(self._tail) - self._num_held :]

    def _first_match(self, window: str) -> tuple[int, int, str] | None:
        """(start, end, string) of the match that ends first, among those that end in the new part of `window`."""
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = window.find(string, max(0, len(self._tail) - len(string) + 1))
            if start >= 0 and (best is None or start + len(string) < best[1]):
                best = start, start + len(string), string
        return best
