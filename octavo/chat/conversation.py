"""A conversation with a model of a bounded length: what was said, as far as it fits; saved as JSON messages."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.chat.terminal import Answer

if TYPE_CHECKING:
    from octavo.client import Client
    from octavo.sampling_params import SamplingParams
from octavo.shared.whole_files import replacing

Message = dict[str, str]  # role, content


class Conversation:
    """Messages so far; each answer is printed and becomes one of them.

    `max_model_len` is in tokens; 0: nothing is left out, and what does not fit is the server's to refuse.
    """

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        system: str | None,
        max_model_len: int = 0,
        model: str = "",
        adapter: str = "",
    ) -> None:
        self._client = client
        self.params = params
        self.system = system or ""
        self.max_model_len, self.model, self._adapter = max_model_len, model, adapter
        self._turns: list[list[Message]] = []  # question and answer, the oldest first

    def ask(self, question: str) -> Answer:
        """Prints the answer as it comes. One that is cut short or fails is remembered as far as it went."""
        asked = {"role": "user", "content": question}
        self._make_room(asked)
        answer = Answer()
        messages, params = self._messages(asked), self.params
        stream = self._client.generate(
            messages=messages, sampling_params=params, model=self.model, adapter=self._adapter
        )
        try:
            answer.show(stream)
        finally:
            stream.close()
            if answer.text:
                self._turns.append([asked, {"role": "assistant", "content": answer.text}])
        return answer

    def undo(self) -> str:
        """Forgets the last question with its answer; returns the question, or an empty string where there is none."""
        return self._turns.pop()[0]["content"] if self._turns else ""

    def clear(self) -> None:
        """Forgets all but the system message."""
        self._turns.clear()

    def save(self, path: Path) -> int:
        """Writes the messages as a JSON list of roles and contents, and returns how many. Raises OSError."""
        messages = self._messages()
        with replacing(path) as file:  # for this user alone: what people ask is theirs
            file.write(json.dumps(messages, indent=1, ensure_ascii=False) + "\n")
        return len(messages)

    def load(self, path: Path) -> int:
        """Goes on from what `save` wrote, in place of what was said here. Raises OSError, and ValueError."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in said]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{path} is no list of messages with role and content in JSON") from None
        if not messages:
            raise ValueError(f"{path} holds no messages")
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        if [each["role"] for each in messages] != ["user", "assistant"] * (len(messages) // 2):
            raise ValueError(f"in {path} questions (user) and answers (assistant) do not take turns")
        self.system = system
        self._turns = [messages[place : place + 2] for place in range(0, len(messages), 2)]
        return len(messages) + bool(system)

    def _messages(self, asked: Message | None = None, first: int = 0) -> list[Message]:
        """The system message, the turns from `first` on, and `asked`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self._turns[first:] for message in turn), *([asked] if asked else [])]

    def _make_room(self, asked: Message) -> None:
        """Forgets the oldest turns until the rest leaves space for an answer, and prints how many."""
        if not self.max_model_len or not self._turns:
            return
        # As long as an answer may be, but never at the cost of more than half of what the model can look back on.
        room = min(self.params.max_tokens or self.max_model_len, self.max_model_len // 2)
        # With fewer turns there are fewer tokens: a thousand that were loaded are not to be counted as often.
        most, turns = self.max_model_len - room, range(len(self._turns))
        if self._count(0, asked) <= most:
            return
        first = bisect_left(turns, True, lo=1, key=lambda turn: self._count(turn, asked) <= most)
        if first == len(turns) and self._count(first, asked) >= self.max_model_len:
            return  # the question by itself is too long, as the server will say: nothing is forgotten for that
        del self._turns[:first]
        what = "the oldest question is" if first == 1 else f"the {first} oldest questions are"
        print(f"({what} forgotten, with the answer: the model takes {self.max_model_len} tokens)", file=sys.stderr)

    def _count(self, first: int, asked: Message) -> int:
        """Tokens of the conversation from this turn on.

        On another thread: Ctrl-C within gRPC may leave its locks taken (see octavo.calls.interruptible_stream).
        """
        with ThreadPoolExecutor(1) as other:
            asking = other.submit(self._client.tokenize, self._messages(asked, first), model=self.model)
            return len(asking.result())
