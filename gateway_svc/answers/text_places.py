"""Where tokens begin in a text that becomes known piece by piece.

A token's own text need not stand there. BOS and other special tokens are not shown, a part of a character is no text by
itself, some decoders take the space off a token that stands alone, and a stop string cuts the text short. Such a token
takes no place, and the next one that is found behind it goes on from there. A token that is text and then a part of a
character, mostly a space in front of it, takes the place of that text.
"""

from __future__ import annotations

NOT_TEXT = "\N{REPLACEMENT CHARACTER}"  # where a token is a part of a character
MAX_UNPLACED_CHARS = 65_536  # that are searched for the next token: some microseconds


class TextPlaces:
    """Of the tokens of one text, in their order."""

    def __init__(self) -> None:
        self._text = ""  # from the first character on that belongs to no token yet, as `add` found it
        self._begin = 0  # of that, in the whole text
        self._at = 0  # in `_text`: where the last token that stands there ends
        self._num_unplaced = 0  # characters of the tokens since that one

    def add(self, text: str) -> None:
        """What is known of the text grows."""
        self._text, self._begin, self._at = self._text[self._at :] + text, self._begin + self._at, 0

    def next(self, token: str) -> int:
        """In characters from the begin of the whole text, and within what is known of it."""
        if not token:
            return self._begin + self._at
        shown, found = token, self._find(token)
        if found < 0 and NOT_TEXT in token:
            shown = token[: token.index(NOT_TEXT)]
            found = self._find(shown) if shown else -1
        if found < 0:
            self._num_unplaced += len(token)
            return self._begin + self._at
        has_space = found > self._at and self._text[found - 1] == " "
        self._at, self._num_unplaced = found + len(shown), len(token) - len(shown)
        return self._begin + found - has_space

    def _find(self, text: str) -> int:
        """In `_text`, no further on than unplaced tokens may reach; -1: it is not there."""
        last = self._at + min(self._num_unplaced, MAX_UNPLACED_CHARS) + 1  # 1: for a space that the token lacks
        return self._text.find(text, self._at, last + len(text))
