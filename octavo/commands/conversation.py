"""A conversation with a model of a bounded length: what was said, as far as it fits."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.commands.terminal import Answer

if TYPE_CHECKING:
    from octavo.client import Client
    from octavo.sampling_params import SamplingParams

Message = dict[str, str]  # role, content


class Conversation:
    """Messages so far; each answer is printed and becomes one of them.

    `max_model_len` is in tokens; 0: nothing is left out, and what does not fit is the server's to refuse.
    """

    def __init__(
        self, client: Client, params: SamplingParams, system: str | None, max_model_len: int = 0, model: str = ""
    ) -> None:
        self._client = client
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[list[Message]] = []  # question and answer, the oldest first
        self._max_model_len = max_model_len
        self._model = model

    def ask(self, question: str) -> Answer:
        """Prints the answer as it comes. One that is cut short or fails is remembered as far as it went."""
        asked = {"role": "user", "content": question}
        self._make_room(asked)
        answer = Answer()
        stream = self._client.generate(messages=self._messages(asked), sampling_params=self._params, model=self._model)
        try:
            answer.show(stream)
        finally:
            stream.close()
            if answer.text:
                self._turns.append([asked, {"role": "assistant", "content": answer.text}])
        return answer

    def _messages(self, asked: Message, first: int = 0) -> list[Message]:
        """With the turns from the first of these on."""
        return [*self._system, *(message for turn in self._turns[first:] for message in turn), asked]

    def _make_room(self, asked: Message) -> None:
        """Drops the oldest turns until the rest leaves space for an answer; returns how many."""
        if not self._max_model_len or not self._turns:
            return
        # As long as an answer may be, but never at the cost of more than half of what the model can look back on.
        room = min(self._params.max_tokens or self._max_model_len, self._max_model_len // 2)
        first = 0
        while (num_tokens := self._count(first, asked)) + room > self._max_model_len and first < len(self._turns):
            first += 1
        if not first or num_tokens >= self._max_model_len:
            return  # the question by itself is too long, as the server will say: nothing is forgotten for that
        del self._turns[:first]
        what = "the oldest question is" if first == 1 else f"the {first} oldest questions are"
        print(f"({what} forgotten, with the answer: the model takes {self._max_model_len} tokens)", file=sys.stderr)

    def _count(self, first: int, asked: Message) -> int:
        """Tokens of the conversation from this turn on.

        On another thread: Ctrl-C within gRPC may leave its locks taken (see octavo.interruptible_stream).
        """
        with ThreadPoolExecutor(1) as other:
            asking = other.submit(self._client.tokenize, self._messages(asked, first), model=self._model)
            return len(asking.result())
