"""What is typed into `octavo chat` that is not for the model: lines that begin with a slash and a known word."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.shared.command_line import did_you_mean
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    from octavo.chat.conversation import Conversation
    from octavo.client import Client

HELP = '''\
/help              this text
/system [TEXT]     show the system message, or set it; /system off leaves it out
/set [NAME VALUE]  show how tokens are drawn, or change it: /set temperature 0.8
/model [NAME]      show the models of this server, or go on with another
/again             ask the last question once more
/undo              forget the last question and its answer
/clear             forget all but the system message
/save FILE         write the conversation as JSON messages; /load FILE goes on from one
/stats             print tokens and speed after answers, or no more
/bye, exit         leave, as Ctrl-D does
"""                begins and ends a question of several lines
Ctrl-C             cuts an answer short
What is too long for the model is forgotten, the oldest first; it is said when that happens.'''
_LEAVING = frozenset({"/bye", "/exit", "/quit", "exit", "quit", "bye"})
_SETTING = re.compile(r"([\w-]*)(?:\s*=\s*(?=\S)|\s*)(.*)", re.DOTALL)  # of `/set`: name value, or name=value
_SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class ChatCommands:
    """Does what lines ask for, and says on standard error what came of it."""

    def __init__(self, conversation: Conversation, client: Client, with_figures: bool = False) -> None:
        self.with_figures = with_figures
        self.is_over = False
        self._conversation, self._client = conversation, client
        # By name: what does it, with the rest of the line; and whether there may be such a rest.
        self._known: dict[str, tuple[Callable[[str], str | None], bool]] = {
            "/help": (lambda _: _say(HELP), False),
            "/?": (lambda _: _say(HELP), False),
            "/system": (self._system, True),
            "/set": (self._set, True),
            "/model": (self._model, True),
            "/again": (self._again, False),
            "/undo": (self._undo, False),
            "/clear": (self._clear, False),
            "/save": (self._save, True),
            "/load": (self._load, True),
            "/stats": (self._stats, False),
        }

    @property
    def names(self) -> list[str]:
        """All words that this knows."""
        return [*self._known, "/bye"]

    def take(self, line: str) -> str:
        """The question that the model is to answer, which is empty where the line was not meant for it."""
        if line.lower() in _LEAVING:
            self.is_over = True
            return ""
        word, _, rest = line.partition(" ")
        action, takes_more = self._known.get(word.lower(), (None, False))
        if action is not None and (takes_more or not rest):
            return action(rest.strip()) or ""
        if line.startswith("/") and not rest and "/" not in line[1:]:
            _say(f"{line} is not known here{did_you_mean(line, self.names)}; /help lists what is")
            return ""
        return line

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text.lower() == "off" else text
        _say(self._conversation.system or "(no system message)")

    def _set(self, text: str) -> None:
        name, value = _SETTING.fullmatch(text).groups()  # type: ignore[union-attr]  # it matches any line
        name = name.replace("-", "_")
        if name and name not in _SETTABLE:
            _say(f"{name} is none of {', '.join(_SETTABLE)}")
            return
        if name:
            try:
                self._conversation.params = dataclasses.replace(self._conversation.params, **{name: _value(value)})
            except ValueError as error:
                _say(f"error: {error}")
                return
        params = self._conversation.params
        _say("  ".join(f"{each} {getattr(params, each)}" for each in ([name] if name else _SETTABLE)))

    def _model(self, name: str) -> None:
        from octavo.errors import RequestFailed

        try:
            if name:
                info = self._client.model_info(name)
                self._conversation.model, self._conversation.max_model_len = name, info.max_model_len
                _say(f"{info.model}, {info.max_model_len} tokens at most")
                return
            for model in self._client.list_models():
                is_asked = model.name == self._conversation.model or (model.is_default and not self._conversation.model)
                _say(f"{'*' if is_asked else ' '} {model.name}")
        except RequestFailed as error:
            _say(f"error: {error.message}")

    def _again(self, _: str) -> str:
        question = self._conversation.undo()
        if not question:
            _say("nothing was asked yet")
        return question

    def _undo(self, _: str) -> None:
        question = self._conversation.undo()
        _say(f"forgotten: {question}" if question else "nothing was asked yet")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        _say("forgotten")

    def _save(self, name: str) -> None:
        self._with_file(name, "saved to", self._conversation.save)

    def _load(self, name: str) -> None:
        self._with_file(name, "loaded from", self._conversation.load)

    def _with_file(self, name: str, what: str, action: Callable[[Path], int]) -> None:
        if not name:
            _say("error: which file?")
            return
        try:
            _say(f"{action(Path(name).expanduser())} messages {what} {name}")
        except OSError as error:
            _say(f"error: {error.strerror}: {name}")
        except ValueError as error:
            _say(f"error: {error}")

    def _stats(self, _: str) -> None:
        self.with_figures = not self.with_figures
        _say(f"speeds are {'shown' if self.with_figures else 'not shown'}")


def _value(text: str) -> Any:
    """A number, a word of JSON, or the text itself; `off` and nothing: as if it were never set."""
    if text.strip().lower() in ("", "off", "none"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _say(text: str) -> None:
    say(text, sys.stderr)
