"""The tokens that the beams of a search have generated, each kept once: beams share what they have in common.

Each token has a place, and knows the place of the one before it. A line is told by its last token's place:

    place    0   1   2   3
    token    a   b   c   d
    before  -1   0   0   1        place 3: "a b d", place 2: "a c"

No token is given back while the search goes on. There are at most as many as the sequences of its beams hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

NO_TOKEN = -1  # the place of a line that is empty


class Line(NamedTuple):
    """Of each token from the first to the last: `ranks` has 1 for the model's most likely one there."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class TokenLines:
    """Starts with no token.

    Attributes:
        before: by place, the place of the token before, or NO_TOKEN.
    """

    def __init__(self) -> None:
        self.before = array("i")
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._ranks = array("i")

    @classmethod
    def of_unknown_tokens(cls, before: Iterable[int]) -> TokenLines:
        """Lines of which only the form is known: their tokens are 0. Raises ValueError if one has no beginning."""
        lines = cls()
        lines.before.extend(before)
        if any(not NO_TOKEN <= place_before < place for place, place_before in enumerate(lines.before)):
            raise ValueError("a token is before itself")
        count = len(lines.before)
        lines._token_ids.extend([0] * count)
        lines._logprobs.extend([0.0] * count)
        lines._ranks.extend([1] * count)
        return lines

    def extend(
        self, before: Iterable[int], token_ids: Iterable[int], logprobs: Iterable[float], ranks: Iterable[int]
    ) -> list[int]:
        """One more token for each line of `before`; returns their places. Logprobs are kept in float32."""
        first = len(self.before)
        self.before.extend(before)
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ranks.extend(ranks)
        return list(range(first, len(self.before)))

    def line(self, last: int) -> Line:
        """The line that ends at this place."""
        places = []
        while last != NO_TOKEN:
            places.append(last)
            last = self.before[last]
        places.reverse()
        return Line(
            token_ids=[self._token_ids[place] for place in places],
            logprobs=[self._logprobs[place] for place in places],
            ranks=[self._ranks[place] for place in places],
        )
