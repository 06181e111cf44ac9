"""Stop strings in a text that arrives in parts, and what of that text may be shown before they are decided.

Which match counts does not depend on how the text is cut: of all matches in the whole text, the one that is complete
first; of those that are complete at the same character, the string that is listed first. (For "abcd" and "bc" in
"abcd", "bc" stops.) Text that may be the beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from scheduler_svc.text.stop_automaton import NO_STRING, StopAutomaton


class CheckedText(NamedTuple):
    """What of a text has been decided."""

    text: str  # what may be shown now
    matched: str | None  # the stop string that ended the text


class StopStrings:
    """The stop strings of one output. Not thread-safe. Each character costs the same, however many are held back.

    `automaton`: of all outputs of the request. `include_in_output`: the matched string is shown; then nothing needs to
    be held back.
    """

    def __init__(self, automaton: StopAutomaton, include_in_output: bool = False) -> None:
        self._automaton = automaton
        self._include_in_output = include_in_output
        self._node = 0
        self._peeked_node = 0  # after what `peek` has seen since the last push
        self._held = HeldText()

    def push(self, text: str, may_match: bool = True) -> CheckedText:
        """The next part of the text. Without `may_match` no match may end in it, though one may begin in it."""
        position, node, index = self._search(self._node, text, may_match)
        if index != NO_STRING:
            return self._match(self._automaton.strings[index], text[:position])
        self._node = self._peeked_node = node
        self._held.append(text)
        kept = 0 if self._include_in_output else self._automaton.num_undecided[node]
        return CheckedText(self._held.take_all_but(kept), None)

    def peek(self, text: str, may_match: bool = True) -> bool:
        """Whether a stop string is complete in text that may be pushed next, behind what was peeked at before it."""
        _, self._peeked_node, index = self._search(self._peeked_node, text, may_match)
        return index != NO_STRING

    def _search(self, node: int, text: str, may_match: bool) -> tuple[int, int, int]:
        """(position, node, index): behind the first match and which string it is, or at the end and NO_STRING."""
        automaton, position = self._automaton, 0
        while position < len(text):
            if not node:
                beginning = automaton.first_letters.search(text, position)
                if beginning is None:
                    break
                position = beginning.start()
            node = automaton.step(node, text[position])
            position += 1
            if may_match and (index := automaton.matched[node]) != NO_STRING:
                return position, node, index
        return position, node, NO_STRING

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        return self._held.take_all_but(0)

    def _match(self, string: str, text: str) -> CheckedText:
        """`string` is complete with the last character of `text`."""
        self._held.append(text)
        shown = self._held.take_all_but(0 if self._include_in_output else len(string))
        return CheckedText(shown, string)


class HeldText:
    """The end of a text: parts are added behind, and characters taken from the front, each touched once."""

    def __init__(self) -> None:
        self._parts: deque[str] = deque()
        self._num_taken = 0  # of the first part
        self._length = 0

    def append(self, text: str) -> None:
        """Costs nothing that grows with what is held."""
        if text:
            self._parts.append(text)
            self._length += len(text)

    def take_all_but(self, num_kept: int) -> str:
        """All but the last `num_kept` characters, which stay."""
        taken = []
        while (surplus := self._length - num_kept) > 0:
            first = self._parts[0]
            piece = first[self._num_taken : self._num_taken + surplus]
            taken.append(piece)
            self._length -= len(piece)
            self._num_taken += len(piece)
            if self._num_taken == len(first):
                self._parts.popleft()
                self._num_taken = 0
        return "".join(taken)
