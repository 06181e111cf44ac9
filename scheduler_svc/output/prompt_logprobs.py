"""The logprobs of one request's prompt: taken as steps bring them, and made into a message piece by piece.

A step may bring those of 2,048 tokens with 20 alternatives each, of which a message takes a tenth of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from protos import inference_pb2 as pb
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns

LOGPROBS_A_PIECE = 1024  # of tokens and alternatives: about 3 ms


class PromptLogprobs:
    """Not thread-safe.

    Args:
        num_top: alternatives of each token, see `LogprobColumns.at`.

    Attributes:
        message: with those that are made; complete when it `is_made`.
        num_taken: tokens, with the first one, which has none.
    """

    def __init__(self, num_top: int, token_text: Callable[[int], str]) -> None:
        self.message = pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs()])
        self.num_taken = 1
        self._num_top = num_top
        self._token_text = token_text
        self._columns: deque[LogprobColumns] = deque()
        self._num_made = 0  # tokens of the first of them

    @property
    def is_made(self) -> bool:
        """Whether the message has all that were taken."""
        return not self._columns

    def take(self, columns: LogprobColumns) -> None:
        """Those of the next tokens; `make_piece` has to follow until all of them are made."""
        if len(columns):
            self._columns.append(columns)
            self.num_taken += len(columns)

    def make_piece(self) -> None:
        """Makes some more. Raises IndexError for columns that are absent."""
        columns, num_left = self._columns[0], LOGPROBS_A_PIECE
        while num_left > 0 and self._num_made < len(columns):
            made = columns.at(self._num_made, self._num_top, self._token_text)
            self.message.prompt_logprobs.append(made)
            self._num_made += 1
            num_left -= 1 + len(made.top)
        if self._num_made == len(columns):
            self._columns.popleft()
            self._num_made = 0
