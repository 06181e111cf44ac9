"""What callers give to `LLM.chat`: one conversation or several, each a list of messages with a role and a text.

Errors name the place as Python writes it, `messages[1][0]["role"]`. Knows nothing of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from octavo.arguments.prompts import checked_text, shown
from octavo.errors import InvalidPrompt

ConversationLike: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages: `{"role": "user", "content": text}`; parts of text, as OpenAI has them, in place of a text."""

_KEYS = ("role", "content")
_ACCEPTED = 'messages, {"role": "user", "content": text}'


class Conversation(NamedTuple):
    """Messages to be put into a prompt by a chat template; None is the server's default."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def read_conversations(given: Any) -> list[list[dict[str, str]]]:
    """The messages of each: `given` is one conversation or a list of them.

    Raises InvalidPrompt, which names the first place that is none.

    >>> read_conversations([{"role": "user", "content": "Hello"}])
    [[{'role': 'user', 'content': 'Hello'}]]
    >>> read_conversations([{"role": "user"}])
    Traceback (most recent call last):
    octavo.errors.InvalidPrompt: messages[0]["content"] is missing
    """
    if not _is_list(given):
        raise InvalidPrompt(f"messages is {shown(given)}; accepted: a list of {_ACCEPTED}, or a list of such lists")
    if given and isinstance(given[0], Mapping):
        return [_conversation(given, "messages")]
    return [_conversation(each, f"messages[{index}]") for index, each in enumerate(given)]


def _conversation(given: Any, place: str) -> list[dict[str, str]]:
    if not _is_list(given) or not given:
        raise InvalidPrompt(f"{place} is {shown(given)}; accepted: a list of {_ACCEPTED}")
    return [_message(message, f"{place}[{index}]") for index, message in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise InvalidPrompt(f"{place} is {shown(given)}; accepted: {_ACCEPTED}")
    if unknown := [key for key in given if key not in _KEYS]:
        raise InvalidPrompt(f'{place}["{unknown[0]}"] is no field of a message; accepted: role, content')
    for key in _KEYS:
        if given.get(key) is None:
            raise InvalidPrompt(f'{place}["{key}"] is missing')
    role = given["role"]
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f'{place}["role"] is {shown(role)}; accepted: system, user, assistant, ...')
    return {"role": checked_text(role, f'{place}["role"]'), "content": _text(given["content"], f'{place}["content"]')}


def _text(given: Any, place: str) -> str:
    """Parts of text are joined by line breaks."""
    if isinstance(given, str):
        return checked_text(given, place)
    if not _is_list(given):
        raise InvalidPrompt(f"{place} is {shown(given)}; accepted: text")
    for index, part in enumerate(given):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or len(part) != 2:
            raise InvalidPrompt(f'{place}[{index}] is {shown(part)}; accepted: {{"type": "text", "text": ...}}')
    return checked_text("\n".join(part["text"] for part in given), place)


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))
